// Attention of single queries, and the choice of rows: see attention.py, dense_attention.py,
// indexer.py and topk.py.
#include <functional>

#include "cpu.h"

namespace {

template <int X, typename T>
void scores_of(const T* const* keys, int64_t n, const float* const* queries, int64_t dim,
               float* scores) {
    constexpr int W = WITH<X>;
    int64_t row = 0;
    for (; row + W <= n; row += W) {
        for (int64_t next = row; next < row + W; next++)
            if (next + AHEAD_ROWS < n) fetch(keys[next + AHEAD_ROWS], dim);
        const Floats result = dots<W, X>(keys + row, queries, dim);
        for (int a = 0; a < W; a++)
            for (int b = 0; b < X; b++) scores[b * n + row + a] = result[a * X + b];
    }
    for (; row < n; row++) {
        const Floats result = dots<1, X>(keys + row, queries, dim);
        for (int b = 0; b < X; b++) scores[b * n + row] = result[b];
    }
}

// Scores [n] become weights; `sink` takes its share of them.
void softmax(float* scores, int64_t n, float scale, float sink) {
    float peak = sink;
    for (int64_t i = 0; i < n; i++) peak = std::max(peak, scores[i] *= scale);
    float total = std::exp(sink - peak);
    Floats sums = {};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        Floats e = exponential(load(scores + i) - peak);
        store(scores + i, e);
        sums += e;
    }
    for (; i < n; i++) total += scores[i] = std::exp(scores[i] - peak);
    total += sum(sums);
    for (i = 0; i < n; i++) scores[i] /= total;
}

// out [X, dim] becomes the sum of rows by weights [X, n]; a few rows at a time stay in the cache.
template <int X, typename T>
void weighted_sum(const float* weights, const T* const* values, int64_t n, int64_t dim,
                  float* out) {
    std::fill(out, out + X * dim, 0.0f);
    for (int64_t first = 0; first < n; first += AHEAD_ROWS) {
        const int64_t last = std::min(first + AHEAD_ROWS, n);
        for (int64_t row = last; row < std::min(last + AHEAD_ROWS, n); row++) fetch(values[row], dim);
        int64_t channel = 0;
        for (; channel + 2 * LANES <= dim; channel += 2 * LANES) {
            Floats low[X], high[X];
            for (int x = 0; x < X; x++) {
                low[x] = load(out + x * dim + channel);
                high[x] = load(out + x * dim + channel + LANES);
            }
            for (int64_t row = first; row < last; row++) {
                const Floats a = load(values[row] + channel);
                const Floats b = load(values[row] + channel + LANES);
                for (int x = 0; x < X; x++) {
                    low[x] += weights[x * n + row] * a;
                    high[x] += weights[x * n + row] * b;
                }
            }
            for (int x = 0; x < X; x++) {
                store(out + x * dim + channel, low[x]);
                store(out + x * dim + channel + LANES, high[x]);
            }
        }
        for (; channel < dim; channel++)
            for (int x = 0; x < X; x++)
                for (int64_t row = first; row < last; row++)
                    out[x * dim + channel] += weights[x * n + row] * number(values[row][channel]);
    }
}

// Up to MAX_ROWS heads [count, dim] of one query over the same rows; sinks may be null.
template <typename Q, typename T>
void attend(const Q* queries, int64_t count, const std::vector<const T*>& keys,
            const std::vector<const T*>& values, int64_t dim, const float* sinks, float scale,
            Q* out) {
    const int64_t n = keys.size();
    std::vector<float> room, scores(count * n), sums(count * dim);
    const float* numbers = as_floats(queries, count * dim, room);
    const float* heads[MAX_ROWS];
    for (int64_t h = 0; h < count; h++) heads[h] = numbers + h * dim;
    with_count(count, [&](auto X) {
        scores_of<X>(keys.data(), n, heads, dim, scores.data());
        for (int h = 0; h < X; h++)
            softmax(scores.data() + h * n, n, scale, sinks ? sinks[h] : -INFINITY);
        weighted_sum<X>(scores.data(), values.data(), n, dim, sums.data());
    });
    for (int64_t i = 0; i < count * dim; i++) put(out + i, sums[i]);
}

template <typename T>
void append(std::vector<const T*>& list, const Rows<const T>& rows, const int64_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (slots[i] >= 0) list.push_back(rows.at(slots[i]));
}

// Heads are taken 8 at a time, the last of them filled up with ones of no weight; keys 2 at a time.
template <typename T>
void index_scores_of(const float* queries, const float* weights, const Rows<const T>& rows,
                     const int64_t* slots, float* scores, int64_t num_tokens, int64_t num_rows,
                     int64_t num_heads, int64_t dim, int64_t threads) {
    constexpr int W = 2, X = MAX_ROWS;
    const int64_t padded = (num_heads + X - 1) / X * X;
    std::vector<const float*> heads(num_tokens * padded);
    std::vector<float> shares(num_tokens * padded * W);  // of X heads, for each key
    for (int64_t i = 0; i < num_tokens * padded; i++) {
        const int64_t token = i / padded, head = i % padded;
        heads[i] = queries + (token * num_heads + head % num_heads) * dim;
        for (int w = 0; w < W; w++)
            shares[i / X * W * X + w * X + i % X] =
                head < num_heads ? weights[token * num_heads + head] : 0;
    }
#pragma omp parallel for collapse(2) num_threads(threads) if (num_tokens * num_rows * num_heads * \
                                                                  dim > MIN_PARALLEL)
    for (int64_t token = 0; token < num_tokens; token++)
        for (int64_t first = 0; first < num_rows; first += W) {
            const int64_t* own = slots + token * num_rows;
            const int64_t last = num_rows - 1;
            if (own[first] < 0) continue;  // present rows come first
            const T* keys[W];
            for (int w = 0; w < W; w++) {  // beyond the last: any will do
                keys[w] = rows.at(std::max<int64_t>(own[std::min(first + w, last)], 0));
                const int64_t next = own[std::min(first + w + AHEAD_ROWS, last)];
                if (next >= 0) fetch(rows.at(next), dim);
            }
            Floats total = {};
            for (int64_t i = token * padded; i < (token + 1) * padded; i += X) {
                const Floats product = dots<W, X>(keys, heads.data() + i, dim);
                total += (product > 0 ? product : Floats{}) * load(shares.data() + i * W);
            }
            for (int64_t w = 0; w < W && first + w <= last; w++) {
                float sum = 0;
                for (int x = 0; x < X; x++) sum += total[w * X + x];
                scores[token * num_rows + first + w] = sum;
            }
        }
}

// What a score counts as: a NaN is chosen before all, so that it shows and is no disorder.
inline float rank(float score) { return score != score ? INFINITY : score; }

// The k best of n scores, in order; equal ones at the cut go to the lowest rows.
void best_of(const float* scores, int64_t n, int64_t k, int64_t* result, std::vector<float>& room) {
    room.resize(n);
    std::transform(scores, scores + n, room.begin(), rank);
    std::nth_element(room.begin(), room.begin() + k - 1, room.end(), std::greater<float>());
    const float cut = room[k - 1];
    int64_t places = k - std::count_if(scores, scores + n, [&](float s) { return rank(s) > cut; });
    for (int64_t row = 0; row < n; row++) {
        const float score = rank(scores[row]);
        if (score > cut || (score == cut && places-- > 0)) *result++ = row;
    }
}

// The second source may have no slots at all.
void sparse_attention(const void* queries, const void* first, int64_t first_page, int64_t first_row,
                      int64_t first_page_rows, const int64_t* first_slots, int64_t first_count,
                      const void* second, int64_t second_page, int64_t second_row,
                      int64_t second_page_rows, const int64_t* second_slots, int64_t second_count,
                      const float* sinks, void* out, int64_t num_tokens, int64_t num_heads,
                      int64_t dim, float scale, int64_t dtype, int64_t rows_dtype,
                      int64_t threads) {
    const int64_t spread = (num_tokens * num_heads + threads - 1) / threads;
    const int64_t block = std::min<int64_t>(MAX_ROWS, spread);
    with_dtype(dtype, [&](auto* type) {
        using Q = std::remove_pointer_t<decltype(type)>;
        with_dtype(rows_dtype, [&](auto* row_type) {
            using T = std::remove_pointer_t<decltype(row_type)>;
            const Rows<const T> a = {static_cast<const T*>(first), first_page, first_row, first_page_rows};
            const Rows<const T> b = {static_cast<const T*>(second), second_page, second_row,
                               second_page_rows};
#pragma omp parallel for collapse(2) num_threads(threads) if (                       \
        num_tokens * num_heads * dim * (first_count + second_count) > MIN_PARALLEL)
            for (int64_t token = 0; token < num_tokens; token++)
                for (int64_t head = 0; head < num_heads; head += block) {
                    std::vector<const T*> rows;
                    append(rows, a, first_slots + token * first_count, first_count);
                    append(rows, b, second_slots + token * second_count, second_count);
                    const int64_t at = (token * num_heads + head) * dim;
                    attend(static_cast<const Q*>(queries) + at, std::min(block, num_heads - head),
                           rows, rows, dim, sinks + head, scale, static_cast<Q*>(out) + at);
                }
        });
    });
}

void dense_attention(const void* queries, const void* rows, int64_t page_stride, int64_t row_stride,
                     int64_t page_rows, const int64_t* pages, int64_t max_pages,
                     const int64_t* num_tokens, void* out, int64_t num_requests, int64_t num_heads,
                     int64_t num_kv_heads, int64_t dim, float scale, int64_t dtype,
                     int64_t rows_dtype, int64_t threads) {
    const int64_t group = num_heads / num_kv_heads;
    with_dtype(dtype, [&](auto* type) {
        using Q = std::remove_pointer_t<decltype(type)>;
        with_dtype(rows_dtype, [&](auto* row_type) {
            using T = std::remove_pointer_t<decltype(row_type)>;
#pragma omp parallel for collapse(2) num_threads(threads)
            for (int64_t request = 0; request < num_requests; request++)
                for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
                    const int64_t n = num_tokens[request];
                    std::vector<const T*> keys(n), values(n);
                    for (int64_t first = 0; first < n; first += page_rows) {
                        const int64_t page = pages[request * max_pages + first / page_rows];
                        const T* at = static_cast<const T*>(rows) + page * page_stride;
                        for (int64_t i = first; i < std::min(first + page_rows, n); i++) {
                            keys[i] = at + (i - first) * row_stride + kv_head * dim;
                            values[i] = keys[i] + num_kv_heads * dim;
                        }
                    }
                    for (int64_t head = 0; head < group; head += MAX_ROWS) {
                        const int64_t at =
                            (request * num_heads + kv_head * group + head) * dim;
                        attend<Q, T>(static_cast<const Q*>(queries) + at,
                                     std::min<int64_t>(MAX_ROWS, group - head), keys, values, dim,
                                     nullptr, scale, static_cast<Q*>(out) + at);
                    }
                }
        });
    });
}

void index_scores(const float* queries, const float* weights, const void* rows, int64_t page_stride,
                  int64_t row_stride, int64_t page_rows, const int64_t* slots, float* scores,
                  int64_t num_tokens, int64_t num_rows, int64_t num_heads, int64_t dim,
                  int64_t rows_dtype, int64_t threads) {
    with_dtype(rows_dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const Rows<const T> keys = {static_cast<const T*>(rows), page_stride, row_stride, page_rows};
        index_scores_of(queries, weights, keys, slots, scores, num_tokens, num_rows, num_heads, dim,
                        threads);
    });
}

void causal_topk(const float* scores, const int64_t* num_visible, int64_t* result,
                 int64_t num_tokens, int64_t num_rows, int64_t k, int64_t threads) {
#pragma omp parallel num_threads(threads) if (num_tokens > 1)
    {
        std::vector<float> room;
#pragma omp for
        for (int64_t token = 0; token < num_tokens; token++) {
            const int64_t visible = std::min(num_visible[token], num_rows);
            int64_t* chosen = result + token * k;
            if (visible > k) {
                best_of(scores + token * num_rows, visible, k, chosen, room);
            } else {
                for (int64_t row = 0; row < k; row++) chosen[row] = row < visible ? row : -1;
            }
        }
    }
}

}  // namespace

EXPORT(sparse_attention)
EXPORT(dense_attention)
EXPORT(index_scores)
EXPORT(causal_topk)
