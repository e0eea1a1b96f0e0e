/* Vectors of sixteen floats, which a compiler splits where a processor's are narrower, and bfloat16, which is `narrow`. */

#pragma once

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define WIDTH 16

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint16_t shorts __attribute__((vector_size(32)));

/* ---- lanes ------------------------------------------------------------------------------------------------------ */

/* Of two vectors the runs of n lanes that stand at even places (0) and at odd ones (1), in turns. */
#define EVEN1(a, b) __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#define ODD1(a, b) __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
#define EVEN2(a, b) __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define ODD2(a, b) __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN4(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#define ODD4(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
#define EVEN8(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define ODD8(a, b) __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)

/* Of two vectors by turns one lane each: the first eight lanes of both, and the last. */
#define FIRST(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LAST(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

INLINE vec load(const void *from, int narrow) {
    if (narrow) {
        shorts bits;
        memcpy(&bits, from, sizeof bits);
        return (vec)(__builtin_convertvector(bits, ints) << 16);
    }
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE float number(const void *from, int64_t index, int narrow) {
    if (!narrow) return ((const float *)from)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[index] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store(void *to, int64_t index, float value, int narrow) {
    if (!narrow) {
        ((float *)to)[index] = value;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    ((uint16_t *)to)[index] = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16); /* to the nearest, ties to even */
}

/* Bits of the nearest narrow numbers, ties to even, in the upper halves; the lower halves are not cleared. */
INLINE ints nearest(vec value) {
    const ints bits = (ints)value;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

/* n numbers from `at` on, as floats. */
INLINE void widen(const void *from, int64_t at, int n, int narrow, float *to) {
    int i = 0;
    for (; i + WIDTH <= n; i += WIDTH) {
        const vec value = load((const char *)from + (at + i) * (narrow ? 2 : 4), narrow);
        memcpy(to + i, &value, sizeof value);
    }
    for (; i < n; i++) to[i] = number(from, at + i, narrow);
}

INLINE void put(const float *from, int n, int narrow, void *to, int64_t at) {
    int i = 0;
    for (; narrow && i + WIDTH <= n; i += WIDTH) {
        vec value;
        memcpy(&value, from + i, sizeof value);
        const shorts bits = __builtin_convertvector(nearest(value) >> 16, shorts);
        memcpy((char *)to + (at + i) * 2, &bits, sizeof bits);
    }
    for (; i < n; i++) store(to, at + i, from[i], narrow);
}

/* As if they had been put away and read again. */
INLINE void round_off(float *x, int n, int narrow) {
    int i = 0;
    for (; narrow && i + WIDTH <= n; i += WIDTH) {
        vec value;
        memcpy(&value, x + i, sizeof value);
        const ints bits = nearest(value) & (int32_t)0xffff0000;
        memcpy(x + i, &bits, sizeof bits);
    }
    for (; narrow && i < n; i++) {
        uint16_t bits;
        store(&bits, 0, x[i], 1);
        x[i] = number(&bits, 0, 1);
    }
}

/* e^x for x <= 0, to two units in the last place: 2^n times a polynomial in what is left (Cephes, expf). */
INLINE float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = __builtin_rintf(x * 1.44269504088896341f), r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}
