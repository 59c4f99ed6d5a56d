// What the CPU's operations share: vectors of 16 floats, numbers in memory, products of few rows.
//
// Sums are fp32 whatever the dtype in memory, and a row's result does not depend on the rows that
// are computed beside it. Compiled by cpu.py for the processor it runs on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

constexpr int64_t LANES = 16;
constexpr int64_t AHEAD_BYTES = 1 << 14;
constexpr int64_t AHEAD_ROWS = 32;
constexpr int MAX_ROWS = 8;              // that share one pass over a matrix
constexpr int64_t MIN_PARALLEL = 1 << 15;  // multiplications that pay for waking a second thread

typedef float Floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(32), aligned(2), may_alias));

struct bf16 {
    uint16_t bits;
};

inline Floats load(const float* at) { return *reinterpret_cast<const Floats*>(at); }
inline Floats load(const bf16* at) {
    return (Floats)(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), Ints) << 16);
}
inline void store(float* at, Floats values) { *reinterpret_cast<Floats*>(at) = values; }

inline float number(float x) { return x; }
inline float number(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}
inline void put(float* at, float value) { *at = value; }
inline void put(bf16* at, float value) {  // to nearest, ties to even
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    at->bits = value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

inline float sum(Floats v) {
    typedef float Eight __attribute__((vector_size(32)));
    typedef float Four __attribute__((vector_size(16)));
    Eight a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    Four b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// e^x to 2 ulp for x <= 0; 0 below -87.
inline Floats exponential(Floats x) {
    const Floats lowest = Floats{} - 87.0f;
    Ints gone = x < lowest;
    x = gone ? lowest : x;
    Floats scaled = x * 1.44269504f;
    Ints n = __builtin_convertvector(scaled - 0.5f, Ints);  // towards zero: to the nearest
    Floats whole = __builtin_convertvector(n, Floats);
    Floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats p = Floats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return gone ? Floats{} : p * (Floats)((n + 127) << 23);
}

// Call f with a number of rows known when compiling.
template <typename F>
void with_count(int64_t count, F f) {
    switch (count) {
        case 1: return f(std::integral_constant<int, 1>());
        case 2: return f(std::integral_constant<int, 2>());
        case 3: return f(std::integral_constant<int, 3>());
        case 4: return f(std::integral_constant<int, 4>());
        case 5: return f(std::integral_constant<int, 5>());
        case 6: return f(std::integral_constant<int, 6>());
        case 7: return f(std::integral_constant<int, 7>());
        case 8: return f(std::integral_constant<int, 8>());
    }
}

// Call f with a null pointer of the dtype's type: 0 fp32, 1 bf16.
template <typename F>
void with_dtype(int64_t dtype, F f) {
    dtype == 0 ? f(static_cast<float*>(nullptr)) : f(static_cast<bf16*>(nullptr));
}

// Lane i is the sum of the lanes of v[i]: 16 vectors halved four times, two becoming one each time.
inline Floats sums_of(const Floats* v) {
    Floats a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) {
        const Floats p = v[2 * i], q = v[2 * i + 1];
        a[i] = __builtin_shufflevector(p, q, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(p, q, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    for (int i = 0; i < 4; i++) {
        const Floats p = a[2 * i], q = a[2 * i + 1];
        b[i] = __builtin_shufflevector(p, q, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(p, q, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    for (int i = 0; i < 2; i++) {
        const Floats p = b[2 * i], q = b[2 * i + 1];
        c[i] = __builtin_shufflevector(p, q, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(p, q, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Matrix rows that are multiplied at a time with X vectors: what fits into the registers.
template <int X>
constexpr int WITH = X > 4 ? 2 : X > 1 ? 4 : 8;

// Lane w * X + x is ws[w] . xs[x] of vectors with k elements: each loaded once. W * X <= 16.
// Ahead: more rows follow, one after another in memory, and are fetched while these are multiplied:
// the processor alone does not look far enough past so much arithmetic (8 vectors: 3 times as fast).
template <int W, int X, bool Ahead = false, typename T>
inline Floats dots(const T* const* ws, const float* const* xs, int64_t k) {
    static_assert(W * X <= LANES);
    Floats sums[LANES];
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++) sums[n] = Floats{};
    int64_t i = 0;
    for (; i + LANES <= k; i += LANES) {
        Floats w[W];
        for (int a = 0; a < W; a++) {
            w[a] = load(ws[a] + i);
            if (Ahead) __builtin_prefetch(ws[a] + i + AHEAD_BYTES / sizeof(T));
        }
        for (int b = 0; b < X; b++) {
            Floats x = load(xs[b] + i);
            for (int a = 0; a < W; a++) sums[a * X + b] += w[a] * x;
        }
    }
    Floats totals = sums_of(sums);
    for (; i < k; i++)
        for (int n = 0; n < W * X; n++) totals[n] += number(ws[n / X][i]) * xs[n % X][i];
    return totals;
}

// Fetch a row that is far from the ones before it in memory.
template <typename T>
inline void fetch(const T* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += 64 / sizeof(T)) __builtin_prefetch(row + i, 0, 2);
}

// Rows as fp32: themselves, or a copy in `room`.
inline const float* as_floats(const float* x, int64_t, std::vector<float>&) { return x; }
inline const float* as_floats(const bf16* x, int64_t count, std::vector<float>& room) {
    room.resize(count);
    for (int64_t i = 0; i < count; i++) room[i] = number(x[i]);
    return room.data();
}

// Where the rows of one layer lie in a pool.
template <typename T>
struct Rows {
    T* base;
    int64_t page_stride, row_stride, page_rows;

    T* at(int64_t slot) const {
        return base + slot / page_rows * page_stride + slot % page_rows * row_stride;
    }
};

// One parameter as Python passes it, in 8 bytes.
union Argument {
    void* pointer;
    int64_t integer;
    double real;

    template <typename P>
    P as() const {
        if constexpr (std::is_pointer_v<P>)
            return static_cast<P>(pointer);
        else if constexpr (std::is_floating_point_v<P>)
            return real;
        else
            return integer;
    }
};

template <typename... P, size_t... I>
void call_with(void (*function)(P...), const Argument* arguments, std::index_sequence<I...>) {
    function(arguments[I].template as<P>()...);
}
template <typename... P>
void call_with(void (*function)(P...), const Argument* arguments) {
    call_with(function, arguments, std::index_sequence_for<P...>());
}

// The function for callers that know no signatures.
#define EXPORT(name) \
    extern "C" void sluice_##name(const Argument* arguments) { call_with(name, arguments); }
