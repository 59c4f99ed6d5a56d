// Products of few rows with matrices that are read once: see matmul.py and moe.py.
#include "cpu.h"

namespace {

// Rows [first, last) of a matrix with k columns times up to MAX_ROWS vectors; put(row, x, value).
template <int X, typename T, typename F>
void multiply(const T* w, int64_t first, int64_t last, int64_t k, const float* const* xs, F put) {
    constexpr int W = WITH<X>;
    int64_t row = first;
    for (; row + W <= last; row += W) {
        const T* ws[W];
        for (int a = 0; a < W; a++) ws[a] = w + (row + a) * k;
        const Floats result = dots<W, X, true>(ws, xs, k);
        for (int a = 0; a < W; a++)
            for (int b = 0; b < X; b++) put(row + a, b, result[a * X + b]);
    }
    for (; row < last; row++) {
        const T* one = w + row * k;
        const Floats result = dots<1, X>(&one, xs, k);
        for (int b = 0; b < X; b++) put(row, b, result[b]);
    }
}

constexpr int64_t PART = 16;  // rows of a matrix that a thread takes at a time

template <typename T>
void linear_of(const T* x, int64_t x_row, int64_t x_group, const T* w, T* out, int64_t groups,
               int64_t m, int64_t n, int64_t k, int64_t threads) {
    const int64_t parts = (n + PART - 1) / PART;
    std::vector<float> room;
    if constexpr (!std::is_same_v<T, float>) {
        room.resize(m * groups * k);
        for (int64_t i = 0; i < m * groups; i++)
            for (int64_t j = 0; j < k; j++)
                room[i * k + j] = number(x[i / groups * x_row + i % groups * x_group + j]);
    }
#pragma omp parallel for num_threads(threads) if (groups * n * k > MIN_PARALLEL)
    for (int64_t item = 0; item < groups * parts; item++) {
        const int64_t group = item / parts, first = item % parts * PART;
        const int64_t last = std::min(first + PART, n);
        for (int64_t base = 0; base < m; base += MAX_ROWS) {
            const int64_t count = std::min<int64_t>(MAX_ROWS, m - base);
            const float* xs[MAX_ROWS];
            for (int64_t b = 0; b < count; b++)
                if constexpr (std::is_same_v<T, float>)
                    xs[b] = x + group * x_group + (base + b) * x_row;
                else
                    xs[b] = room.data() + ((base + b) * groups + group) * k;
            with_count(count, [&](auto X) {
                multiply<X>(w + group * n * k, first, last, k, xs,
                            [&](int64_t row, int64_t b, float value) {
                                put(out + ((base + b) * groups + group) * n + row, value);
                            });
            });
        }
    }
}

// The tokens' choices of one expert.
struct Chosen {
    int64_t expert;
    std::vector<int64_t> places;  // token * num_chosen + choice
};

std::vector<Chosen> by_expert(const int64_t* experts, int64_t num_places, int64_t num_experts) {
    std::vector<Chosen> all(num_experts), used;
    for (int64_t place = 0; place < num_places; place++)
        all[experts ? experts[place] : 0].places.push_back(place);
    for (int64_t expert = 0; expert < num_experts; expert++)
        if (!all[expert].places.empty()) used.push_back({expert, std::move(all[expert].places)});
    return used;
}

float swiglu(float gate, float up, float limit) {
    gate = std::min(gate, limit);
    return gate / (1 + std::exp(-gate)) * std::max(-limit, std::min(up, limit));
}

template <typename T>
void experts_of(const T* x, const int64_t* experts, const float* weights, const T* w13, const T* w2,
                float* out, int64_t m, int64_t num_chosen, int64_t num_experts, int64_t hidden,
                int64_t width, float limit, int64_t threads) {
    const int64_t num_places = m * num_chosen;
    std::vector<float> room, gated(num_places * width), outputs(num_places * hidden);
    const float* tokens = as_floats(x, m * hidden, room);
    const std::vector<Chosen> used = by_expert(experts, num_places, num_experts);
#pragma omp parallel num_threads(threads) if (num_places * hidden * width > MIN_PARALLEL)
    {
        // Calls f(expert, places, their count) for up to MAX_ROWS places of an expert at a time.
        auto each = [&](auto f) {
            for (const Chosen& chosen : used)
                for (size_t base = 0; base < chosen.places.size(); base += MAX_ROWS)
                    f(chosen.expert, chosen.places.data() + base,
                      std::min<int64_t>(MAX_ROWS, chosen.places.size() - base));
        };
        each([&](int64_t expert, const int64_t* places, int64_t count) {
            const T* w = w13 + expert * 2 * width * hidden;
            const float* xs[MAX_ROWS];
            for (int64_t b = 0; b < count; b++) xs[b] = tokens + places[b] / num_chosen * hidden;
            with_count(count, [&](auto X) {
#pragma omp for nowait
                for (int64_t row = 0; row < width; row++) {
                    const T* pair[2] = {w + row * hidden, w + (width + row) * hidden};
                    const Floats result = dots<2, X, true>(pair, xs, hidden);
                    for (int b = 0; b < X; b++)  // weighted before w2, as the models were trained
                        gated[places[b] * width + row] =
                            swiglu(result[b], result[X + b], limit) *
                            (weights ? weights[places[b]] : 1);
                }
            });
        });
#pragma omp barrier
        each([&](int64_t expert, const int64_t* places, int64_t count) {
            const T* w = w2 + expert * hidden * width;
            const float* xs[MAX_ROWS];
            for (int64_t b = 0; b < count; b++) xs[b] = gated.data() + places[b] * width;
            with_count(count, [&](auto X) {
#pragma omp for nowait
                for (int64_t part = 0; part < (hidden + PART - 1) / PART; part++)
                    multiply<X>(w, part * PART, std::min((part + 1) * PART, hidden), width, xs,
                                [&](int64_t row, int64_t b, float value) {
                                    outputs[places[b] * hidden + row] = value;
                                });
            });
        });
#pragma omp barrier
#pragma omp for
        for (int64_t token = 0; token < m; token++)
            for (int64_t channel = 0; channel < hidden; channel++) {
                float total = 0;
                for (int64_t choice = 0; choice < num_chosen; choice++)
                    total += outputs[(token * num_chosen + choice) * hidden + channel];
                out[token * hidden + channel] = total;
            }
    }
}

// logits [m, num_experts] to choices [m, num_chosen], their scores' shares being `weights`. The
// choices are those of the token in `table`, or else the best by score + bias.
void choose_experts(const float* logits, const float* bias, const int64_t* table,
                    const int64_t* token_ids, int64_t* chosen, float* weights, int64_t m,
                    int64_t num_experts, int64_t num_chosen, float routed_scale) {
    std::vector<float> scores(num_experts), ranks(num_experts);
    for (int64_t token = 0; token < m; token++) {
        for (int64_t e = 0; e < num_experts; e++) {
            const float logit = logits[token * num_experts + e];
            scores[e] = std::sqrt(logit > 20 ? logit : std::log1p(std::exp(logit)));
            ranks[e] = bias ? scores[e] + bias[e] : 0;
        }
        float total = 0;
        for (int64_t choice = 0; choice < num_chosen; choice++) {
            const int64_t best = std::max_element(ranks.begin(), ranks.end()) - ranks.begin();
            const int64_t e = table ? table[token_ids[token] * num_chosen + choice] : best;
            ranks[e] = -INFINITY;
            chosen[token * num_chosen + choice] = e;
            total += weights[token * num_chosen + choice] = scores[e];
        }
        for (int64_t choice = 0; choice < num_chosen; choice++)
            weights[token * num_chosen + choice] *= routed_scale / std::max(total, 1e-20f);
    }
}

void linear(const void* x, int64_t x_row, int64_t x_group, const void* w, void* out, int64_t groups,
            int64_t m, int64_t n, int64_t k, int64_t dtype, int64_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        linear_of(static_cast<const T*>(x), x_row, x_group, static_cast<const T*>(w),
                  static_cast<T*>(out), groups, m, n, k, threads);
    });
}

void experts(const void* x, const int64_t* chosen, const float* weights, const void* w13,
             const void* w2, float* out, int64_t m, int64_t num_chosen, int64_t num_experts,
             int64_t hidden, int64_t width, float limit, int64_t dtype, int64_t threads) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        experts_of(static_cast<const T*>(x), chosen, weights, static_cast<const T*>(w13),
                   static_cast<const T*>(w2), out, m, num_chosen, num_experts, hidden, width, limit,
                   threads);
    });
}

}  // namespace

EXPORT(choose_experts)
EXPORT(linear)
EXPORT(experts)
