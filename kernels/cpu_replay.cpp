// A recorded step in one call: see capture.py.
#include "cpu.h"

struct Operation {
    void (*function)(const Argument*);
    const Argument* arguments;
};

extern "C" void sluice_replay(const Operation* operations, int64_t count) {
    for (int64_t i = 0; i < count; i++) operations[i].function(operations[i].arguments);
}
