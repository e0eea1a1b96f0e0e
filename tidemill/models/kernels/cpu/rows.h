/* Functions on rows that several files use. Numbers are float32, or bfloat16 if `narrow`. */

#pragma once

#include <stdint.h>

/* Rows of one query each, over a layer's pages `kv`. q [rows, q_heads, size]: rows `q_stride` numbers apart; out [rows, q_heads,
 * size]: dense. Row r belongs to sequence slots[r] of the table, and sees its tokens [lows[r], ends[r]). In `order` [n], rows
 * that begin with the same pages are neighbours. */
typedef struct {
    const void *kv, *q;
    void *out;
    const int32_t *table;
    const int64_t *slots, *lows, *ends, *order;
    int64_t q_stride, table_stride;
    int n, q_heads, kv_heads, size, page_size, narrow;
    float scale;
} paged_queries;

int tidemill_attend(const paged_queries *of, int threads);

void tidemill_write(void *kv, int width, const void *k, int64_t k_stride, const void *v, int64_t v_stride,
                    const int64_t *writes, int n, int kv_heads, int size, int page_size);

void tidemill_norm(const void *x, int64_t stride, int narrow, const void *weight, int narrow_weight, float eps, void *out,
                   int narrow_out, int n, int size, int threads);

void tidemill_rotate(const void *x, int64_t stride, int narrow, const void *q_weight, const void *k_weight, int narrow_weights,
                     float eps, const void *cos, const void *sin, int narrow_angles, void *out, int n, int heads, int q_heads,
                     int size, int threads);

void tidemill_gate(const void *x, int narrow, void *out, int n, int size, int threads);

int tidemill_linear(const void *x, int64_t stride, const void *packed, const void *bias, void *out, int kind, int narrow_out,
                    int n, int outputs, int inputs, int threads);
