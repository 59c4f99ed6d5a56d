// Small operations on rows: see norm.py, rope.py, rows.py, compressor.py, accumulators.py and
// hyper_connections.py.
#include "cpu.h"

namespace {

template <typename T>
void norm_row(const T* x, T* out, int64_t dim, const float* weight, float eps) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < dim; i++) squares += number(x[i]) * number(x[i]);
    const float factor = 1 / std::sqrt(squares / dim + eps);
    for (int64_t i = 0; i < dim; i++)
        put(out + i, weight ? number(x[i]) * factor * weight[i] : number(x[i]) * factor);
}

// Pairs (2i, 2i + 1) at the end of a row, turned in place.
template <typename T>
void rotate_row(T* x, int64_t dim, const float* turn, int64_t pairs, bool inverse) {
    T* tail = x + dim - 2 * pairs;
    for (int64_t i = 0; i < 2 * pairs; i += 2) {
        const float even = number(tail[i]), odd = number(tail[i + 1]);
        const float c = turn[i], s = inverse ? -turn[i + 1] : turn[i + 1];
        put(tail + i, even * c - odd * s);
        put(tail + i + 1, even * s + odd * c);
    }
}

// comb [n, n]: softmax of the rows, then columns and rows normalised in turn.
void balance(float* comb, int64_t n, int64_t iters, float eps) {
    for (int64_t row = 0; row < n; row++) {
        float* at = comb + row * n;
        const float peak = *std::max_element(at, at + n);
        float total = 0;
        for (int64_t i = 0; i < n; i++) total += at[i] = std::exp(at[i] - peak);
        for (int64_t i = 0; i < n; i++) at[i] = at[i] / total + eps;
    }
    for (int64_t iter = 0; iter < iters; iter++) {
        for (int64_t row = 0; iter && row < n; row++) {
            float total = eps;
            for (int64_t i = 0; i < n; i++) total += comb[row * n + i];
            for (int64_t i = 0; i < n; i++) comb[row * n + i] /= total;
        }
        for (int64_t column = 0; column < n; column++) {
            float total = eps;
            for (int64_t i = 0; i < n; i++) total += comb[i * n + column];
            for (int64_t i = 0; i < n; i++) comb[i * n + column] /= total;
        }
    }
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// x [num_tokens, rows_per_token, dim] of two strides to out, contiguous; weight, turns may be null.
void norm_rotate(const void* x, int64_t x_token, int64_t x_row, void* out, const float* weight,
                 const float* turns, int64_t num_tokens, int64_t rows_per_token, int64_t dim,
                 float eps, int64_t pairs, int64_t inverse, int64_t dtype, int64_t threads) {
    const int64_t num_rows = num_tokens * rows_per_token;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
#pragma omp parallel for num_threads(threads) if (num_rows * dim > MIN_PARALLEL)
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t token = row / rows_per_token;
            T* to = static_cast<T*>(out) + row * dim;
            norm_row(static_cast<const T*>(x) + token * x_token + row % rows_per_token * x_row, to,
                     dim, weight, eps);
            if (turns) rotate_row(to, dim, turns + token * 2 * pairs, pairs, inverse);
        }
    });
}

void rotate(void* x, int64_t x_token, int64_t x_row, const float* turns, int64_t num_tokens,
            int64_t rows_per_token, int64_t dim, int64_t pairs, int64_t inverse, int64_t dtype,
            int64_t threads) {
    const int64_t num_rows = num_tokens * rows_per_token;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
#pragma omp parallel for num_threads(threads) if (num_rows * pairs > MIN_PARALLEL)
        for (int64_t row = 0; row < num_rows; row++) {
            const int64_t token = row / rows_per_token;
            rotate_row(static_cast<T*>(x) + token * x_token + row % rows_per_token * x_row, dim,
                       turns + token * 2 * pairs, pairs, inverse);
        }
    });
}

void write_rows(void* rows, int64_t page_stride, int64_t row_stride, int64_t page_rows,
                const int64_t* slots, const void* values, int64_t count, int64_t size,
                int64_t rows_dtype, int64_t dtype) {
    with_dtype(rows_dtype, [&](auto* row_type) {
        using R = std::remove_pointer_t<decltype(row_type)>;
        with_dtype(dtype, [&](auto* type) {
            using T = std::remove_pointer_t<decltype(type)>;
            const Rows<R> pool = {static_cast<R*>(rows), page_stride, row_stride, page_rows};
            for (int64_t i = 0; i < count; i++) {
                if (slots[i] < 0) continue;
                const T* from = static_cast<const T*>(values) + i * size;
                R* to = pool.at(slots[i]);
                for (int64_t j = 0; j < size; j++) put(to + j, number(from[j]));
            }
        });
    });
}

// A tensor of up to two dimensions, or one that is repeated along some: 0 strides.
template <typename T>
struct Spread {
    const T* base;
    int64_t outer, inner;

    T at(int64_t i, int64_t j) const { return base[i * outer + j * inner]; }
};

void page_slots(const int64_t* tokens, int64_t tokens_outer, int64_t tokens_inner,
                const int64_t* request, int64_t request_outer, int64_t request_inner,
                const bool* valid, int64_t valid_outer, int64_t valid_inner, const int64_t* pages,
                int64_t pages_stride, const int64_t* first_pages, int64_t* out, int64_t outer,
                int64_t inner, int64_t tokens_per_page, int64_t tokens_per_row) {
    const Spread<int64_t> token = {tokens, tokens_outer, tokens_inner};
    const Spread<int64_t> owner = {request, request_outer, request_inner};
    const Spread<bool> real = {valid, valid_outer, valid_inner};
    const int64_t rows_per_page = tokens_per_page / tokens_per_row;
    for (int64_t i = 0; i < outer; i++)
        for (int64_t j = 0; j < inner; j++) {
            if (valid && !real.at(i, j)) {
                *out++ = -1;
                continue;
            }
            const int64_t at = token.at(i, j), r = owner.at(i, j);
            const int64_t first = first_pages ? first_pages[r] : 0;
            const int64_t column = std::max<int64_t>(at / tokens_per_page - first, 0);
            *out++ = pages[r * pages_stride + column] * rows_per_page +
                     at % tokens_per_page / tokens_per_row;
        }
}

// Unit complex numbers [num_tokens, pairs].
void rotations(const int64_t* positions, const float* frequencies, float* out, int64_t num_tokens,
               int64_t pairs) {
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t pair = 0; pair < pairs; pair++) {
            const float angle = float(positions[token]) * frequencies[pair];
            *out++ = std::cos(angle);
            *out++ = std::sin(angle);
        }
}

// Blocks' rows [num_blocks, dim] from tokens' kv and score; `overlap` as compressor.py draws it.
void compress(const float* rows, int64_t page_stride, int64_t row_stride, int64_t page_rows,
              const int64_t* slots, float* out, int64_t num_blocks, int64_t num_tokens, int64_t dim,
              int64_t overlap) {
    const Rows<const float> pool = {rows, page_stride, row_stride, page_rows};
    const int64_t width = overlap ? 2 * dim : dim;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t* own = slots + block * num_tokens;
        float* to = out + block * dim;
        std::vector<const float*> kv;
        for (int64_t i = 0; i < num_tokens; i++)
            if (own[i] >= 0)
                kv.push_back(pool.at(own[i]) + (overlap && i >= num_tokens / 2 ? dim : 0));
        if (kv.empty()) {  // padding
            std::fill(to, to + dim, 0.0f);
            continue;
        }
        for (int64_t channel = 0; channel < dim; channel++) {
            float peak = -INFINITY, total = 0, sum = 0;
            for (const float* token : kv) peak = std::max(peak, token[width + channel]);
            for (const float* token : kv) {
                const float weight = std::exp(token[width + channel] - peak);
                total += weight;
                sum += weight * token[channel];
            }
            to[channel] = sum / total;
        }
    }
}

// Blocks' max, sum and weighted kv [num_blocks, 3, dim] after tokens in ascending order of block.
void accumulate(const float* rows, int64_t page_stride, int64_t row_stride, int64_t page_rows,
                const int64_t* slots, const int64_t* block_of_token, const float* kv,
                int64_t kv_stride, const float* score, int64_t score_stride, float* out,
                int64_t num_blocks, int64_t num_tokens, int64_t dim, float lowest) {
    const Rows<const float> pool = {rows, page_stride, row_stride, page_rows};
    for (int64_t block = 0; block < num_blocks; block++) {
        float* to = out + block * 3 * dim;
        const int64_t slot = slots[block];
        const float* from = pool.at(std::max<int64_t>(slot, 0));
        for (int64_t i = 0; i < 3 * dim; i++)
            to[i] = slot >= 0 ? from[i] : i < dim ? lowest : 0.0f;
    }
    for (int64_t token = 0; token < num_tokens; token++) {
        float* to = out + block_of_token[token] * 3 * dim;
        for (int64_t i = 0; i < dim; i++) {
            const float s = score[token * score_stride + i], peak = std::max(to[i], s);
            const float kept = std::exp(to[i] - peak), weight = std::exp(s - peak);
            to[i] = peak;
            to[dim + i] = to[dim + i] * kept + weight;
            to[2 * dim + i] = to[2 * dim + i] * kept + weight * kv[token * kv_stride + i];
        }
    }
}

// mixes [num_tokens, n * (2 + n)], or [num_tokens, n] where `iters` is 0: streams times fn.
void collapse(const void* streams, const float* mixes, const float* scale, int64_t scale_step,
              const float* base, void* x, float* post, float* comb, int64_t num_tokens, int64_t n,
              int64_t hidden, int64_t iters, float eps, float norm_eps, int64_t dtype) {
    const int64_t count = iters ? n * (2 + n) : n;
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        for (int64_t token = 0; token < num_tokens; token++) {
            const T* from = static_cast<const T*>(streams) + token * n * hidden;
            float squares = 0;
#pragma omp simd reduction(+ : squares)
            for (int64_t i = 0; i < n * hidden; i++) squares += number(from[i]) * number(from[i]);
            const float rms = std::sqrt(squares / (n * hidden) + norm_eps);
            auto mix = [&](int64_t i) {
                return base[i] + mixes[token * count + i] / rms * scale[i * scale_step];
            };
            std::vector<float> total(hidden);
            for (int64_t stream = 0; stream < n; stream++) {
                const float weight = sigmoid(mix(stream)) + eps;
                for (int64_t i = 0; i < hidden; i++)
                    total[i] += weight * number(from[stream * hidden + i]);
            }
            for (int64_t i = 0; i < hidden; i++)
                put(static_cast<T*>(x) + token * hidden + i, total[i]);
            if (!iters) continue;
            for (int64_t i = 0; i < n; i++) post[token * n + i] = 2 * sigmoid(mix(n + i));
            for (int64_t i = 0; i < n * n; i++) comb[token * n * n + i] = mix(2 * n + i);
            balance(comb + token * n * n, n, iters, eps);
        }
    });
}

void mix_out(const void* output, const void* streams, const float* post, const float* comb,
             void* out, int64_t num_tokens, int64_t n, int64_t hidden, int64_t dtype) {
    with_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        std::vector<float> total(hidden);
        for (int64_t token = 0; token < num_tokens; token++)
            for (int64_t k = 0; k < n; k++) {
                const T* added = static_cast<const T*>(output) + token * hidden;
                for (int64_t i = 0; i < hidden; i++)
                    total[i] = post[token * n + k] * number(added[i]);
                for (int64_t j = 0; j < n; j++) {
                    const T* stream = static_cast<const T*>(streams) + (token * n + j) * hidden;
                    const float weight = comb[(token * n + j) * n + k];
                    for (int64_t i = 0; i < hidden; i++) total[i] += weight * number(stream[i]);
                }
                T* to = static_cast<T*>(out) + (token * n + k) * hidden;
                for (int64_t i = 0; i < hidden; i++) put(to + i, total[i]);
            }
    });
}

}  // namespace

EXPORT(norm_rotate)
EXPORT(rotate)
EXPORT(page_slots)
EXPORT(rotations)
EXPORT(write_rows)
EXPORT(compress)
EXPORT(accumulate)
EXPORT(collapse)
EXPORT(mix_out)
