/* The operations between matrix products: norms, rotations and gates, each with its backward pass.
 *
 * A backward pass takes `d`, the gradient of the output, and computes that of the input. With `again`, it also computes the
 * output once more, to the same bits, and writes it over `d`, so that the caller need not keep it. Numbers are float32, or
 * bfloat16 if `narrow`; intermediate results are float32.
 */

#include "rows.h"
#include "vectors.h"

#define PIECE 256 /* numbers that are processed at a time by a gate */

/* ---- sums over rows --------------------------------------------------------------------------------------------- */

/* Rows are divided into the same runs for any number of threads, and the sums of the runs are added in order. */
INLINE int first_row(int share, int shares, int n) { return (int)((int64_t)n * share / shares); }

/* Adds sums [shares, size] up into the first. */
static void add_up(float *sums, int shares, int size) {
    for (int share = 1; share < shares; share++)
        for (int i = 0; i < size; i++) sums[i] += sums[share * size + i];
}

/* ---- norms ------------------------------------------------------------------------------------------------------ */

INLINE float scale_of(const float *x, float eps, int size) {
    float sum = 0;
    _Pragma("omp simd reduction(+ : sum)") for (int i = 0; i < size; i++) sum += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(sum / (float)size + eps);
}

INLINE void scale_row(float *x, const float *weight, float scale, int size, int narrow) {
    for (int i = 0; i < size; i++) x[i] *= scale;
    round_off(x, size, narrow);
    for (int i = 0; i < size; i++) x[i] *= weight[i];
}

/* One row of a root-mean-square norm: x * rsqrt(mean(x^2) + eps) * weight. In a narrow row, the normalised x is rounded before it
 * is multiplied by the weight, as models of this family were trained. */
INLINE void norm_row(float *x, const float *weight, float eps, int size, int narrow) {
    scale_row(x, weight, scale_of(x, eps, size), size, narrow);
}

/* Backward pass of one row; overwrites d, and adds the weights' gradient to `sums`. Returns the scale. */
INLINE float norm_row_back(const float *x, const float *weight, float eps, int size, float *d, float *sums) {
    const float scale = scale_of(x, eps, size);
    float along = 0;
    for (int i = 0; i < size; i++) sums[i] += d[i] * x[i] * scale;
    for (int i = 0; i < size; i++) d[i] *= weight[i];
    _Pragma("omp simd reduction(+ : along)") for (int i = 0; i < size; i++) along += d[i] * x[i];
    along *= scale * scale / (float)size;
    for (int i = 0; i < size; i++) d[i] = (d[i] - x[i] * along) * scale;
    return scale;
}

/* Weights [size] as floats, rounded to the dtype of the numbers they are applied to. */
INLINE void weights_for(int narrow, const void *weight, int narrow_weight, int size, float *to) {
    widen(weight, 0, size, narrow_weight, to);
    round_off(to, size, narrow);
}

/* x [n, size], rows `stride` numbers apart; out is dense. */
void tidemill_norm(const void *x, int64_t stride, int narrow, const void *weight, int narrow_weight, float eps, void *out,
                   int narrow_out, int n, int size, int threads) {
    float weights[size];
    weights_for(narrow, weight, narrow_weight, size, weights);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++) {
        float wide[size];
        widen(x, row * stride, size, narrow, wide);
        norm_row(wide, weights, eps, size, narrow);
        put(wide, size, narrow_out, out, (int64_t)row * size);
    }
}

/* d [n, size]: gradient of the norm's output. d and dx are dense. sums [shares, size]: the first becomes the weights' gradient. */
void tidemill_norm_back(const void *x, int64_t stride, int narrow, const void *weight, int narrow_weight, float eps,
                        void *d, int narrow_d, void *dx, float *sums, int again, int shares, int n, int size, int threads) {
    float weights[size];
    weights_for(narrow, weight, narrow_weight, size, weights);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int share = 0; share < shares; share++) {
        float wide[size], back[size], *sum = sums + (int64_t)share * size;
        for (int i = 0; i < size; i++) sum[i] = 0;
        for (int row = first_row(share, shares, n); row < first_row(share + 1, shares, n); row++) {
            widen(x, row * stride, size, narrow, wide);
            widen(d, (int64_t)row * size, size, narrow_d, back);
            const float scale = norm_row_back(wide, weights, eps, size, back, sum);
            put(back, size, narrow, dx, (int64_t)row * size);
            if (again) {
                scale_row(wide, weights, scale, size, narrow);
                put(wide, size, narrow_d, d, (int64_t)row * size);
            }
        }
    }
    add_up(sums, shares, size);
}

/* ---- rotations -------------------------------------------------------------------------------------------------- */

/* A loop over a head is several times as fast if the compiler knows its length. */
#define FOR_SIZE(function, size, ...) \
    (size == 32    ? function(32, __VA_ARGS__) \
     : size == 64  ? function(64, __VA_ARGS__) \
     : size == 128 ? function(128, __VA_ARGS__) \
                   : function(size, __VA_ARGS__))

/* Heads to rotate, of `size` numbers each; the first q_heads are queries. Rows of x lie `stride` numbers apart. */
typedef struct {
    const void *x, *cos, *sin;
    int64_t stride;
    float *weights; /* of queries and of keys, or NULL */
    float eps;
    int narrow, narrow_angles, heads, q_heads;
} Turn;

INLINE void rotate_row(const int size, const Turn *of, int64_t row, void *out) {
    const int half = size / 2, narrow_out = of->narrow && of->narrow_angles;
    float wide[size], turned[size], c[half], s[half];
    widen(of->cos, row * half, half, of->narrow_angles, c);
    widen(of->sin, row * half, half, of->narrow_angles, s);
    for (int head = 0; head < of->heads; head++) {
        widen(of->x, row * of->stride + (int64_t)head * size, size, of->narrow, wide);
        if (of->weights) {
            norm_row(wide, of->weights + (head >= of->q_heads) * size, of->eps, size, of->narrow);
            round_off(wide, size, of->narrow);
        }
        for (int i = 0; i < half; i++) {
            turned[i] = wide[i] * c[i] - wide[i + half] * s[i];
            turned[i + half] = wide[i + half] * c[i] + wide[i] * s[i];
        }
        put(turned, size, narrow_out, out, (row * of->heads + head) * size);
    }
}

/* One row of `tidemill_rotate_back`, which begins at `q_at` in dq, at `k_at` in dk and at `to` in dx. */
INLINE void rotate_row_back(const int size, const Turn *of, int64_t row, const void *dq, int64_t q_at, const void *dk,
                            int64_t k_at, void *dx, int64_t to, float *sums) {
    const int half = size / 2, narrow_d = of->narrow && of->narrow_angles;
    float wide[size], d[size], back[size], c[half], s[half];
    widen(of->cos, row * half, half, of->narrow_angles, c);
    widen(of->sin, row * half, half, of->narrow_angles, s);
    for (int head = 0; head < of->heads; head++) {
        const int key = head >= of->q_heads;
        widen(key ? dk : dq, key ? k_at + (int64_t)(head - of->q_heads) * size : q_at + (int64_t)head * size, size, narrow_d, d);
        for (int i = 0; i < half; i++) {
            back[i] = d[i] * c[i] + d[i + half] * s[i];
            back[i + half] = d[i + half] * c[i] - d[i] * s[i];
        }
        if (of->weights) {
            widen(of->x, row * of->stride + (int64_t)head * size, size, of->narrow, wide);
            norm_row_back(wide, of->weights + key * size, of->eps, size, back, sums + key * size);
        }
        put(back, size, of->narrow, dx, to + (int64_t)head * size);
    }
}

/* Norms (if there are weights) and rotates the first `heads` heads of each row of x: `q_heads` queries, then keys. cos and sin
 * [n, size / 2] are those of a row's position, for the two halves of a head. out [n, heads, size] is dense, and narrow if both
 * x and the angles are. */
void tidemill_rotate(const void *x, int64_t stride, int narrow, const void *q_weight, const void *k_weight, int narrow_weights,
                     float eps, const void *cos, const void *sin, int narrow_angles, void *out, int n, int heads, int q_heads,
                     int size, int threads) {
    float weights[2 * size];
    if (q_weight) weights_for(narrow, q_weight, narrow_weights, size, weights);
    if (k_weight) weights_for(narrow, k_weight, narrow_weights, size, weights + size);
    const Turn of = {x, cos, sin, stride, q_weight ? weights : 0, eps, narrow, narrow_angles, heads, q_heads};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++) FOR_SIZE(rotate_row, size, &of, row, out);
}

/* dq, dk: gradients of what `tidemill_rotate` wrote; dv: of the `v_heads` heads behind; each with its own stride between rows.
 * dx [n, heads + v_heads, size]: dense. sums [shares, 2, size]: the first become the gradients of the query and key weights. */
void tidemill_rotate_back(const void *x, int64_t stride, int narrow, const void *q_weight, const void *k_weight,
                          int narrow_weights, float eps, const void *cos, const void *sin, int narrow_angles, const void *dq,
                          int64_t dq_stride, const void *dk, int64_t dk_stride, const void *dv, int64_t dv_stride, void *dx,
                          float *sums, int shares, int n, int heads, int q_heads, int v_heads, int size, int threads) {
    const int width = narrow ? 2 : 4;
    float weights[2 * size];
    if (q_weight) weights_for(narrow, q_weight, narrow_weights, size, weights);
    if (k_weight) weights_for(narrow, k_weight, narrow_weights, size, weights + size);
    const Turn of = {x, cos, sin, stride, q_weight ? weights : 0, eps, narrow, narrow_angles, heads, q_heads};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int share = 0; share < shares; share++) {
        float *sum = sums + (int64_t)share * 2 * size;
        for (int i = 0; i < 2 * size; i++) sum[i] = 0;
        for (int row = first_row(share, shares, n); row < first_row(share + 1, shares, n); row++) {
            const int64_t to = (int64_t)row * (heads + v_heads) * size;
            FOR_SIZE(rotate_row_back, size, &of, row, dq, row * dq_stride, dk, row * dk_stride, dx, to, sum);
            memcpy((char *)dx + (to + (int64_t)heads * size) * width, (const char *)dv + row * dv_stride * width,
                   (size_t)v_heads * size * width);
        }
    }
    add_up(sums, shares, 2 * size);
}

/* ---- gates ------------------------------------------------------------------------------------------------------ */

/* The logistic function of x, and 1 minus it, both to full precision. */
INLINE float sigmoid(float x, float *lacks) {
    const float e = exponential(x < 0 ? x : -x), share = 1.0f / (1.0f + e);
    *lacks = x < 0 ? share : e * share;
    return x < 0 ? e * share : share;
}

/* out [n, size] = gate * sigmoid(gate) * up, from x [n, 2 * size], gate and up side by side. */
void tidemill_gate(const void *x, int narrow, void *out, int n, int size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++)
        for (int at = 0; at < size; at += PIECE) {
            const int count = size - at < PIECE ? size - at : PIECE;
            const int64_t from = (int64_t)row * 2 * size + at;
            float room[3][PIECE], *to = narrow ? room[2] : (float *)out + (int64_t)row * size + at, lacks;
            const float *gates = narrow ? room[0] : (const float *)x + from, *ups = narrow ? room[1] : gates + size;
            if (narrow) widen(x, from, count, 1, room[0]), widen(x, from + size, count, 1, room[1]);
            for (int i = 0; i < count; i++) to[i] = gates[i] * sigmoid(gates[i], &lacks) * ups[i];
            if (narrow) put(to, count, 1, out, (int64_t)row * size + at);
        }
}

/* d [n, size] and dx [n, 2 * size] dense, as x. */
void tidemill_gate_back(const void *x, int narrow, void *d, void *dx, int again, int n, int size, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int row = 0; row < n; row++)
        for (int at = 0; at < size; at += PIECE) {
            const int count = size - at < PIECE ? size - at : PIECE;
            const int64_t from = (int64_t)row * 2 * size + at;
            float gates[PIECE], ups[PIECE], back[PIECE], lacks;
            widen(x, from, count, narrow, gates);
            widen(x, from + size, count, narrow, ups);
            widen(d, (int64_t)row * size + at, count, narrow, back);
            for (int i = 0; i < count; i++) {
                const float gate = gates[i], up = ups[i], share = sigmoid(gate, &lacks), changes = share * back[i];
                gates[i] = changes * (1.0f + gate * lacks) * up;
                ups[i] = changes * gate;
                back[i] = gate * share * up;
            }
            put(gates, count, narrow, dx, from);
            put(ups, count, narrow, dx, from + size);
            if (again) put(back, count, narrow, d, (int64_t)row * size + at);
        }
}
