/* Vectors of as many floats as a register holds, and bfloat16 numbers, which are called `narrow`. */

#pragma once

#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

/* WIDTH: floats in a vector. REGISTERS: vectors that fit the registers. A compiler splits vectors that are wider than the
 * processor's, which is slow; only a test asks for those. */
#if defined(WIDTH)
#define REGISTERS 16
#elif defined(__AVX512F__)
#define WIDTH 16
#define REGISTERS 32
#elif defined(__AVX2__)
#define WIDTH 8
#define REGISTERS 16
#elif defined(__aarch64__)
#define WIDTH 4
#define REGISTERS 32
#else
#define WIDTH 4
#define REGISTERS 16
#endif

#define FULL (REGISTERS * 3 / 4) /* vectors of sums in registers, which leaves room for the summands */

typedef float vec __attribute__((vector_size(WIDTH * 4)));
typedef int32_t ints __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t shorts __attribute__((vector_size(WIDTH * 2)));

/* ---- lanes ------------------------------------------------------------------------------------------------------ */

/* OF(n, lane) for every lane. */
#define FOUR(OF, n, i) OF(n, i), OF(n, i + 1), OF(n, i + 2), OF(n, i + 3)
#if WIDTH == 16
#define EACH(OF, n) FOUR(OF, n, 0), FOUR(OF, n, 4), FOUR(OF, n, 8), FOUR(OF, n, 12)
#elif WIDTH == 8
#define EACH(OF, n) FOUR(OF, n, 0), FOUR(OF, n, 4)
#else
#define EACH(OF, n) FOUR(OF, n, 0)
#endif

#define ITSELF(n, i) (i)
#define LANES ((ints){EACH(ITSELF, 0)})

/* Runs of n lanes at even (odd) places of two vectors, alternating between the vectors. */
#define EVEN_LANE(n, i) ((i) & (n) ? WIDTH + (i) - (n) : (i))
#define ODD_LANE(n, i) ((i) & (n) ? WIDTH + (i) : (i) + (n))
#define EVEN(n, a, b) __builtin_shufflevector(a, b, EACH(EVEN_LANE, n))
#define ODD(n, a, b) __builtin_shufflevector(a, b, EACH(ODD_LANE, n))

/* Interleaves the lanes of two vectors: FIRST those of their first halves, LAST those of their last. */
#define TURNS_LANE(n, i) ((i) & 1 ? WIDTH + (n) + (i) / 2 : (n) + (i) / 2)
#define FIRST(a, b) __builtin_shufflevector(a, b, EACH(TURNS_LANE, 0))
#define LAST(a, b) __builtin_shufflevector(a, b, EACH(TURNS_LANE, WIDTH / 2))

/* Transposes a square of WIDTH by WIDTH units of four bytes. */
#define EXCHANGE(n)                                                                                                         \
    UNROLL for (int i = 0; i < WIDTH; i++) if (!(i & n)) {                                                                  \
        const ints x = square[i], y = square[i + n];                                                                        \
        square[i] = EVEN(n, x, y);                                                                                          \
        square[i + n] = ODD(n, x, y);                                                                                       \
    }

INLINE void turn(ints *square) {
    EXCHANGE(1)
    EXCHANGE(2)
#if WIDTH > 4
    EXCHANGE(4)
#endif
#if WIDTH > 8
    EXCHANGE(8)
#endif
}

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

/* Bits of the nearest narrow numbers (ties to even), in the upper halves; the lower halves are undefined. */
INLINE ints nearest(vec value) {
    const ints bits = (ints)value;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

/* Converts n numbers from `at` on to floats. */
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

/* Rounds numbers to narrow ones and back. */
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

/* e^x for x <= 0, to two units in the last place: 2^n times a polynomial in the remainder (Cephes, expf). */
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
