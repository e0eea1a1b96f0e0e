/* Attention inside sequences, each seeing itself, and what flows back through it: for training.
 *
 * Sequences come in families: each shares its first tokens with the one before it, or nothing, and then a family begins. What is
 * shared is held once, computed once, and what flows back into it is the sum over all that see it. A family and one key/value
 * head are a piece of work: its keys and values are laid out once, and of the next sequence only what differs is.
 *
 * All is computed in float32. Scores are never kept: the passage back computes them again from the logarithm of each query's
 * total weight (as in 2205.14135).
 */

#include "vectors.h"

#include <math.h>
#include <stdlib.h>

#define QUERIES 24     /* of one head and sequence that are taken together */
#define KEYS 256       /* that they see at a time */
#define FULL 24        /* vectors of sums that are held in registers */
#define MOST_NUMBERS 128 /* of a head */

/* Numbers with `stride` from token to token, head after head. */
typedef struct {
    char *numbers;
    int64_t stride;
    int32_t narrow, unused;
} operand;

/* Families [F + 1]: their first sequences. Sequences [B + 1]: their first of `places`, which name each position's token. The
 * first shared [B] positions of a sequence are those of the one before it. */
typedef struct {
    const int64_t *families, *sequences, *places, *shared;
    int32_t count, longest, heads, kv_heads, size, window; /* window: positions that are seen, 0: all before */
} layout;

/* ---- products --------------------------------------------------------------------------------------------------- */

/* c [R, 16 V] = or += a [R, K] b [K, 16 V]; a's rows lie `down` apart, its columns `along`. */
INLINE void tile(int R, int V, float *c, int64_t ldc, const float *a, int64_t down, int64_t along, const float *b, int64_t ldb,
                 int K, int adds) {
    vec sums[FULL];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) sums[r * V + v] = adds ? load(c + r * ldc + v * WIDTH, 0) : (vec){0};
    for (int k = 0; k < K; k++) {
        vec right[4];
        UNROLL for (int v = 0; v < V; v++) right[v] = load(b + k * ldb + v * WIDTH, 0);
        UNROLL for (int r = 0; r < R; r++) {
            const float left = a[r * down + k * along];
            UNROLL for (int v = 0; v < V; v++) sums[r * V + v] += left * right[v];
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < V; v++) memcpy(c + r * ldc + v * WIDTH, &sums[r * V + v], sizeof(vec));
}

INLINE void columns(int V, float *c, int64_t ldc, const float *a, int64_t down, int64_t along, const float *b, int64_t ldb, int M,
                    int K, int adds) {
    int m = 0;
    for (; m + 12 / V * 2 <= M && V > 1; m += 12 / V * 2)
        tile(12 / V * 2, V, c + m * ldc, ldc, a + m * down, down, along, b, ldb, K, adds);
    for (; m + 12 <= M && V == 1; m += 12) tile(12, V, c + m * ldc, ldc, a + m * down, down, along, b, ldb, K, adds);
    for (; m + 3 <= M; m += 3) tile(3, V, c + m * ldc, ldc, a + m * down, down, along, b, ldb, K, adds);
    for (; m < M; m++) tile(1, V, c + m * ldc, ldc, a + m * down, down, along, b, ldb, K, adds);
}

/* c [M, N] = or += a [M, K] b [K, N], N a multiple of 16. */
static void product(float *c, int64_t ldc, const float *a, int64_t down, int64_t along, const float *b, int64_t ldb, int M, int N,
                    int K, int adds) {
    int n = 0;
    for (; n + 4 * WIDTH <= N; n += 4 * WIDTH) columns(4, c + n, ldc, a, down, along, b + n, ldb, M, K, adds);
    for (; n + 2 * WIDTH <= N; n += 2 * WIDTH) columns(2, c + n, ldc, a, down, along, b + n, ldb, M, K, adds);
    for (; n < N; n += WIDTH) columns(1, c + n, ldc, a, down, along, b + n, ldb, M, K, adds);
}

/* ---- one key/value head of a sequence --------------------------------------------------------------------------- */

/* Where a family's keys and values are laid out, by position; [size, row] where they stand upright. */
typedef struct {
    int64_t row;
    float *keys, *values, *upright_keys, *upright_values, *d_keys, *d_values; /* of a passage back only: empty between families */
} room;

/* What some queries have: [QUERIES, KEYS] and [QUERIES, size]. */
typedef struct {
    float weights[QUERIES * KEYS], d_weights[QUERIES * KEYS];
    float asked[QUERIES * MOST_NUMBERS], d_asked[QUERIES * MOST_NUMBERS];
    float seen[QUERIES * MOST_NUMBERS], d_seen[QUERIES * MOST_NUMBERS];
    float greatest[QUERIES], total[QUERIES], drawn[QUERIES];
} work;

INLINE void read(const operand *from, int64_t token, int head, int size, float *to) {
    widen(from->numbers, token * from->stride + (int64_t)head * size, size, from->narrow, to);
}

INLINE void write(const float *from, const operand *to, int64_t token, int head, int size) {
    put(from, size, to->narrow, to->numbers, token * to->stride + (int64_t)head * size);
}

static void lay_out(const operand *from, const int64_t *places, int begin, int end, int head, int size, int64_t row, float *lying,
                    float *upright) {
    for (int at = begin; at < end; at++) {
        float numbers[MOST_NUMBERS];
        read(from, places[at], head, size, numbers);
        if (lying) memcpy(lying + (int64_t)at * size, numbers, size * sizeof(float));
        if (upright)
            for (int i = 0; i < size; i++) upright[i * row + at] = numbers[i];
    }
}

/* The keys [*low, *end) of a block from `first` on that the query at `position` sees. */
INLINE void sight(int position, int window, int first, int *low, int *end) {
    const int from = window && position - window + 1 > first ? position - window + 1 - first : 0;
    *end = position + 1 - first < 0 ? 0 : position + 1 - first < KEYS ? position + 1 - first : KEYS;
    *low = from < *end ? from : *end;
}

INLINE int up_to(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

/* The first block that any of the queries from `position` on sees. */
INLINE int first_block(int position, int window) {
    return window && position - window + 1 > 0 ? (position - window + 1) / KEYS * KEYS : 0;
}

static void forward(const layout *all, const room *kv, const operand *q, const operand *out, float *totals, const int64_t *places,
                    int begin, int count, int head, float scale, work *w) {
    const int size = all->size, last = begin + count - 1;
    for (int i = 0; i < count; i++) {
        read(q, places[begin + i], head, size, w->asked + i * size);
        for (int e = 0; e < size; e++) w->asked[i * size + e] *= scale;
        w->greatest[i] = -INFINITY, w->total[i] = 0;
    }
    memset(w->seen, 0, count * size * sizeof(float));
    for (int first = first_block(begin, all->window); first <= last; first += KEYS) {
        const int n = last + 1 - first < KEYS ? last + 1 - first : KEYS, wide = up_to(n, WIDTH);
        product(w->weights, KEYS, w->asked, size, 1, kv->upright_keys + first, kv->row, count, wide, size, 0);
        for (int i = 0; i < count; i++) {
            float *scores = w->weights + i * KEYS, most = w->greatest[i], sum = 0;
            int low, end;
            sight(begin + i, all->window, first, &low, &end);
            _Pragma("omp simd reduction(max : most)") for (int j = low; j < end; j++) most = scores[j] > most ? scores[j] : most;
            if (most > w->greatest[i]) {
                const float less = w->total[i] ? exponential(w->greatest[i] - most) : 0;
                for (int e = 0; e < size; e++) w->seen[i * size + e] *= less;
                w->total[i] *= less, w->greatest[i] = most;
            }
            for (int j = 0; j < low; j++) scores[j] = 0;
            _Pragma("omp simd reduction(+ : sum)") for (int j = low; j < end; j++) {
                scores[j] = exponential(scores[j] - most);
                sum += scores[j];
            }
            for (int j = end; j < n; j++) scores[j] = 0;
            w->total[i] += sum;
        }
        product(w->seen, size, w->weights, KEYS, 1, kv->values + (int64_t)first * size, size, count, size, n, 1);
    }
    for (int i = 0; i < count; i++) {
        for (int e = 0; e < size; e++) w->seen[i * size + e] /= w->total[i];
        write(w->seen + i * size, out, places[begin + i], head, size);
        totals[places[begin + i] * all->heads + head] = w->greatest[i] + logf(w->total[i]);
    }
}

static void backward(const layout *all, const room *kv, const operand *q, const operand *out, const operand *d_out,
                     const operand *d_q, const float *totals, const int64_t *places, int begin, int count, int head, float scale,
                     work *w) {
    const int size = all->size, last = begin + count - 1;
    for (int i = 0; i < count; i++) {
        const int64_t token = places[begin + i];
        float *seen = w->seen + i * size, *d_seen = w->d_seen + i * size, sum = 0;
        read(q, token, head, size, w->asked + i * size);
        for (int e = 0; e < size; e++) w->asked[i * size + e] *= scale;
        read(out, token, head, size, seen);
        read(d_out, token, head, size, d_seen);
        for (int e = 0; e < size; e++) sum += seen[e] * d_seen[e];
        w->drawn[i] = sum, w->total[i] = totals[token * all->heads + head];
    }
    memset(w->d_asked, 0, count * size * sizeof(float));
    for (int first = first_block(begin, all->window); first <= last; first += KEYS) {
        const int n = last + 1 - first < KEYS ? last + 1 - first : KEYS, wide = up_to(n, WIDTH);
        const int64_t from = (int64_t)first * size;
        product(w->weights, KEYS, w->asked, size, 1, kv->upright_keys + first, kv->row, count, wide, size, 0);
        product(w->d_weights, KEYS, w->d_seen, size, 1, kv->upright_values + first, kv->row, count, wide, size, 0);
        for (int i = 0; i < count; i++) {
            float *weights = w->weights + i * KEYS, *d_weights = w->d_weights + i * KEYS;
            const float total = w->total[i], drawn = w->drawn[i];
            int low, end;
            sight(begin + i, all->window, first, &low, &end);
            for (int j = 0; j < low; j++) weights[j] = d_weights[j] = 0;
            _Pragma("omp simd") for (int j = low; j < end; j++) {
                weights[j] = exponential(weights[j] - total);
                d_weights[j] = weights[j] * (d_weights[j] - drawn);
            }
            for (int j = end; j < n; j++) weights[j] = d_weights[j] = 0;
        }
        product(kv->d_values + from, size, w->weights, 1, KEYS, w->d_seen, size, n, size, count, 1);
        product(kv->d_keys + from, size, w->d_weights, 1, KEYS, w->asked, size, n, size, count, 1);
        product(w->d_asked, size, w->d_weights, KEYS, 1, kv->keys + from, size, count, size, n, 1);
    }
    for (int i = 0; i < count; i++) {
        for (int e = 0; e < size; e++) w->d_asked[i * size + e] *= scale;
        write(w->d_asked + i * size, d_q, places[begin + i], head, size);
    }
}

/* ---- families --------------------------------------------------------------------------------------------------- */

typedef struct {
    operand q, k, v, out, d_out, d_q, d_k, d_v;
    float *totals; /* [tokens, heads] */
    float scale;
    int32_t back;
} tensors;

/* What flowed into positions [begin, end) goes where they lie, and their room is empty again. */
static void hand_over(const room *kv, const tensors *t, const int64_t *places, int begin, int end, int head, int size) {
    for (int at = begin; at < end; at++) {
        write(kv->d_keys + (int64_t)at * size, &t->d_k, places[at], head, size);
        write(kv->d_values + (int64_t)at * size, &t->d_v, places[at], head, size);
    }
    memset(kv->d_keys + (int64_t)begin * size, 0, (int64_t)(end - begin) * size * sizeof(float));
    memset(kv->d_values + (int64_t)begin * size, 0, (int64_t)(end - begin) * size * sizeof(float));
}

static void family(const layout *all, const tensors *t, int64_t number, int kv_head, const room *kv, work *w) {
    const int size = all->size, group = all->heads / all->kv_heads;
    const int64_t end = all->families[number + 1];
    for (int64_t i = all->families[number]; i < end; i++) {
        const int64_t *places = all->places + all->sequences[i];
        const int length = (int)(all->sequences[i + 1] - all->sequences[i]), own = (int)all->shared[i];
        lay_out(&t->k, places, own, length, kv_head, size, kv->row, t->back ? kv->keys : NULL, kv->upright_keys);
        lay_out(&t->v, places, own, length, kv_head, size, kv->row, t->back ? NULL : kv->values,
                t->back ? kv->upright_values : NULL);
        for (int at = own; at < length; at += QUERIES) {
            const int count = length - at < QUERIES ? length - at : QUERIES;
            for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
                if (t->back)
                    backward(all, kv, &t->q, &t->out, &t->d_out, &t->d_q, t->totals, places, at, count, head, t->scale, w);
                else
                    forward(all, kv, &t->q, &t->out, t->totals, places, at, count, head, t->scale, w);
        }
        if (t->back) hand_over(kv, t, places, i + 1 < end ? (int)all->shared[i + 1] : 0, length, kv_head, size);
    }
}

/* Forward: `out` and `totals` from q, k and v. Back: d_q, d_k and d_v from these and d_out. Returns 0, 1 when there is no memory.
 * Every number is computed by one thread, in an order that does not depend on how many there are. */
int tidemill_sequences(const layout *all, const tensors *t, int threads) {
    const int64_t row = up_to(all->longest, WIDTH) + KEYS, part = row * all->size, pieces = (int64_t)all->count * all->kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
    {
        float *memory = calloc(6 * part, sizeof(float));
        work *w = aligned_alloc(64, up_to(sizeof(work), 64));
        const room kv = {row, memory, memory + part, memory + 2 * part, memory + 3 * part, memory + 4 * part, memory + 5 * part};
        failed = !memory || !w;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces; i++)
            if (!failed) family(all, t, i / all->kv_heads, (int)(i % all->kv_heads), &kv, w);
        free(memory), free(w);
    }
    return failed;
}
