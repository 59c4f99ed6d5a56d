// A recorded step in one call: see capture.py.
#include "cpu.h"

extern "C" void sluice_replay(void (*const* functions)(const Argument*),
                              const Argument* const* arguments, int64_t count) {
    for (int64_t i = 0; i < count; i++) functions[i](arguments[i]);
}
