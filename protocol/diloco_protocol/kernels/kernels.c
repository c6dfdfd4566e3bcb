/* Tensor work on one chunk, in one pass over memory; `__init__.py` declares and calls these functions.
 *
 * The bits are torch's. So nothing is contracted or reordered by the compiler (-ffp-contract=off, no
 * -ffast-math): where torch fuses a product and a sum (`add(..., alpha=w)`), `fmaf` stands here.
 *
 * Each function works on PIECE elements at a time, in buffers that stay in a core's first-level cache,
 * with one short loop for each value that is computed: compilers vectorize such loops. Pieces are
 * as small as 1 KiB because most tensors begin at the same offset in a page: larger pieces of several
 * tensors would evict each other. Payloads may have any address: the types below have the alignment of
 * a byte.
 */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX2__ /* and F16C: hatch_build.py asks for both */
#include <immintrin.h>
#endif

/* The digest of this file, by which a library that was built from another one is found. */
const char diloco_source[] = SOURCE_DIGEST;

enum { PIECE = 256, BLOCK = 256, HALF = BLOCK / 2, SPARSE_BLOCK = 4096, MOST_KEPT = 512 };
/* How a chunk lies in memory. INT8 and INT4: a bf16 scale for each block, then the codes. SPARSE and
 * above: a row for each SPARSE_BLOCK (docs/codecs.md); the form is the number of elements it keeps. */
enum form { FP32, BF16, FP16, INT8, INT4, SPARSE = 16 };

typedef uint16_t __attribute__((aligned(1), may_alias)) u16;

/* One summand: a chunk and its weight. */
struct term {
    int64_t form;
    const uint8_t *data;
    float weight;
};

static const uint32_t MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000;
static const float MAX_FLOAT = 3.4028234663852886e38f;

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The bits of the nearest bf16, half to even; not for NaN. */
static inline uint32_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

#ifdef __AVX2__
static inline float of_fp16(uint16_t bits) { return _cvtsh_ss(bits); }
static inline uint16_t to_fp16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }
#else
static inline float of_fp16(uint16_t bits) {
    __fp16 value;
    memcpy(&value, &bits, sizeof value);
    return (float)value;
}

static inline uint16_t to_fp16(float value) {
    __fp16 rounded = (__fp16)value;
    uint16_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return bits;
}
#endif

/* Write values that nobody reads soon: the cache does not fetch what they replace. `end_stream` follows. */
static inline void stream(float *to, const float *from, ptrdiff_t size) {
    ptrdiff_t j = 0;
#ifdef __AVX2__
    if ((uintptr_t)to % sizeof(__m256) == 0)
        for (; j + 8 <= size; j += 8) _mm256_stream_ps(to + j, _mm256_loadu_ps(from + j));
#endif
    for (; j < size; j++) to[j] = from[j];
}

static inline void end_stream(void) {
#ifdef __AVX2__
    _mm_sfence(); /* before another thread reads them */
#endif
}

/* Prefetch the block two ahead. Encoding is bound by computation, so without this a core does not load a
 * block until it needs it, and waits. A prefetch past the end of the values does not fault. */
static inline void prefetch(const float *block) {
    const uintptr_t line = 64, later = (uintptr_t)block + 2 * BLOCK * sizeof *block;
    for (uintptr_t at = later; at < later + BLOCK * sizeof *block; at += line)
        __builtin_prefetch((const void *)at);
}

static inline ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* Decode one block into BLOCK values. */
static inline void read_block(enum form form, const uint8_t *data, ptrdiff_t blocks,
                              ptrdiff_t block, float *restrict out) {
    float scale = of_bits((uint32_t)((const u16 *)data)[block] << 16);
    if (form == INT8) {
        const int8_t *codes = (const int8_t *)data + 2 * blocks + block * BLOCK;
        for (int j = 0; j < BLOCK; j++) out[j] = (float)codes[j] * scale;
    } else {
        const uint8_t *pairs = data + 2 * blocks + block * HALF;
        for (int j = 0; j < HALF; j++) out[j] = (float)((pairs[j] & 15) - 8) * scale;
        for (int j = 0; j < HALF; j++) out[j + HALF] = (float)((pairs[j] >> 4) - 8) * scale;
    }
}

/* A row of a sparse chunk: indices of 12 bits, signs, which magnitude, and two magnitudes in bf16. */
struct row {
    int kept;
    uint8_t *indices, *signs, *larger;
    u16 *scales;
};

static inline struct row row_of(enum form form, const uint8_t *data, ptrdiff_t block) {
    int kept = (int)form;
    uint8_t *row = (uint8_t *)data + block * (kept * 7 / 4 + 4), *signs = row + kept * 3 / 2;
    return (struct row){kept, row, signs, signs + kept / 8, (u16 *)(signs + kept / 4)};
}

static inline int index_in(struct row row, int i) {
    const uint8_t *pair = row.indices + i / 2 * 3;
    return i % 2 ? pair[1] >> 4 | pair[2] << 4 : pair[0] | (pair[1] & 15) << 8;
}

static inline bool bit_of(const uint8_t *bits, int i) { return bits[i / 8] >> i % 8 & 1; }

/* Decode `size` values of a sparse block from its element `start` on. */
static inline void read_sparse(struct row row, ptrdiff_t start, ptrdiff_t size, float *restrict out) {
    memset(out, 0, 4 * (size_t)size);
    for (int i = 0; i < row.kept; i++) {
        ptrdiff_t at = index_in(row, i) - start;
        float scale = of_bits((uint32_t)row.scales[bit_of(row.larger, i)] << 16);
        if (at >= size) break;
        /* + 0: a decoder has no value -0. */
        if (at >= 0) out[at] = (bit_of(row.signs, i) ? -scale : scale) + 0.0f;
    }
}

/* Decode `size` values from `at` on; `out` has room for PIECE. */
static inline void read(enum form form, const uint8_t *data, ptrdiff_t elements, ptrdiff_t at,
                        ptrdiff_t size, float *restrict out) {
    if (form == FP32) {
        memcpy(out, data + 4 * at, 4 * (size_t)size);
    } else if (form == BF16) {
        const u16 *values = (const u16 *)data + at;
        for (ptrdiff_t j = 0; j < size; j++) out[j] = of_bits((uint32_t)values[j] << 16);
    } else if (form == FP16) {
        const u16 *values = (const u16 *)data + at;
        for (ptrdiff_t j = 0; j < size; j++) out[j] = of_fp16(values[j]);
    } else if (form >= SPARSE) {
        read_sparse(row_of(form, data, at / SPARSE_BLOCK), at % SPARSE_BLOCK, size, out);
    } else {
        ptrdiff_t blocks = (elements + BLOCK - 1) / BLOCK;
        for (ptrdiff_t j = 0; j < size; j += BLOCK)
            read_block(form, data, blocks, (at + j) / BLOCK, out + j);
    }
}

/* The sum of `size` elements of the terms, in their order, divided. `total` and `room`: PIECE each. */
static inline void summed(const struct term *terms, ptrdiff_t count, float divisor,
                          ptrdiff_t elements, ptrdiff_t at, ptrdiff_t size,
                          float *restrict total, float *restrict room) {
    for (ptrdiff_t i = 0; i < count; i++) {
        float weight = terms[i].weight;
        if (i == 0) {
            read(terms[i].form, terms[i].data, elements, at, size, total);
            if (weight != 1)
                for (ptrdiff_t j = 0; j < size; j++) total[j] *= weight;
        } else {
            read(terms[i].form, terms[i].data, elements, at, size, room);
            for (ptrdiff_t j = 0; j < size; j++) total[j] = fmaf(room[j], weight, total[j]);
        }
    }
    if (divisor != 1)
        for (ptrdiff_t j = 0; j < size; j++) total[j] /= divisor;
}

/* The largest magnitude, as bits: those of floats without a sign are in the order of the values. */
static inline uint32_t largest(const float *values, ptrdiff_t size) {
    uint32_t top = 0;
    for (ptrdiff_t j = 0; j < size; j++) {
        uint32_t bits = bits_of(values[j]) & MAGNITUDE;
        top = top > bits ? top : bits;
    }
    return top;
}

/* Add the second half of `2 count` values to the first. */
static inline void add_half(float *values, int count) {
    for (int j = 0; j < count; j++) values[j] += values[j + count];
}

/* The sum of 2 to MOST_KEPT values, a power of two of them: halves are added until one is left. Compilers
 * vectorize the steps since each has a constant length. */
static inline float halved(float *values, int count) {
    if (count > 256) add_half(values, 256);
    if (count > 128) add_half(values, 128);
    if (count > 64) add_half(values, 64);
    if (count > 32) add_half(values, 32);
    if (count > 16) add_half(values, 16);
    if (count > 8) add_half(values, 8);
    if (count > 4) add_half(values, 4);
    if (count > 2) add_half(values, 2);
    return values[0] + values[1];
}

/* The sum of bit patterns, two values at a time; only the last piece of a chunk may have an odd size. */
static inline uint64_t bit_sum(const float *values, ptrdiff_t size) {
    uint64_t sum = 0, pair;
    for (ptrdiff_t j = 0; j < size / 2; j++) {
        memcpy(&pair, values + 2 * j, sizeof pair);
        sum += pair;
    }
    return size % 2 ? sum + bits_of(values[size - 1]) : sum;
}

/* out <- sum(weight x) / divisor. `out` may be the memory of an fp32 term. */
void diloco_add_up(const struct term *terms, ptrdiff_t count, float divisor, ptrdiff_t elements,
                   float *out) {
    float total[PIECE], room[PIECE];
    for (ptrdiff_t at = 0; at < elements; at += PIECE) {
        ptrdiff_t size = least(PIECE, elements - at);
        summed(terms, count, divisor, elements, at, size, total, room);
        memcpy(out + at, total, 4 * (size_t)size);
    }
}

/* The sum of a coded chunk's squared values; infinite where a value may be too large for fp32. */
double diloco_squares(enum form form, const uint8_t *data, ptrdiff_t elements) {
    ptrdiff_t blocks = (elements + BLOCK - 1) / BLOCK;
    const float max_scale = 0x1p120f;
    double found = 0;
    for (ptrdiff_t at = 0; form >= SPARSE && at < elements; at += SPARSE_BLOCK) {
        struct row row = row_of(form, data, at / SPARSE_BLOCK);
        int counts[2] = {0, 0};
        for (int i = 0; i < row.kept; i++)
            if (at + index_in(row, i) < elements) counts[bit_of(row.larger, i)]++;
        for (int i = 0; i < 2; i++) {
            float scale = of_bits((uint32_t)row.scales[i] << 16 & MAGNITUDE);
            if (!(scale < max_scale)) return INFINITY;
            found += (double)scale * scale * counts[i];
        }
    }
    for (ptrdiff_t block = 0; form < SPARSE && block < blocks; block++) {
        int32_t sum = 0;
        if (form == INT8) {
            const int8_t *codes = (const int8_t *)data + 2 * blocks + block * BLOCK;
            for (int j = 0; j < BLOCK; j++) sum += (int32_t)codes[j] * codes[j];
        } else {
            const uint8_t *pairs = data + 2 * blocks + block * HALF;
            for (int j = 0; j < HALF; j++) {
                int32_t low = (pairs[j] & 15) - 8, high = (pairs[j] >> 4) - 8;
                sum += low * low + high * high;
            }
        }
        float scale = of_bits((uint32_t)((const u16 *)data)[block] << 16 & MAGNITUDE);
        if (!(scale < max_scale)) return INFINITY;
        found += (double)scale * scale * sum;
    }
    return found;
}

/* The bits of a block's scale in bf16, from its values and the bits of their largest magnitude. */
static inline uint32_t scale_of(const float *values, uint32_t top, float most, bool is_rms) {
    /* fp32 cannot hold the squares of blocks that are shorter or longer than this (`block_codecs`). */
    const float shortest = 1e-14f, longest = 1e18f;
    uint32_t cap = bits_of(MAX_FLOAT / most) >> 16, scale;
    float magnitude = of_bits(top), squares[BLOCK];
    if (is_rms) {
        for (int j = 0; j < BLOCK; j++) squares[j] = values[j] * values[j];
        float length = sqrtf(halved(squares, BLOCK)), root = length * 0.0625f;
        if (!(length >= shortest && length <= longest)) {
            float by = magnitude > 0 ? magnitude : 1;
            for (int j = 0; j < BLOCK; j++) squares[j] = values[j] / by;
            for (int j = 0; j < BLOCK; j++) squares[j] *= squares[j];
            root = sqrtf(halved(squares, BLOCK) * (1.0f / BLOCK)) * magnitude;
        }
        scale = to_bf16(root);
    } else {
        float wanted = magnitude / most;
        scale = to_bf16(wanted);
        if (of_bits(scale << 16) < wanted) scale++;
    }
    return scale < cap ? scale : cap;
}

/* Whether the indices of each row of a sparse chunk ascend. */
bool diloco_ascends(enum form form, const uint8_t *data, ptrdiff_t elements) {
    bool is_fine = true;
    for (ptrdiff_t at = 0; at < elements; at += SPARSE_BLOCK) {
        struct row row = row_of(form, data, at / SPARSE_BLOCK);
        for (int i = 1; i < row.kept; i++) is_fine &= index_in(row, i - 1) < index_in(row, i);
    }
    return is_fine;
}

/* How many magnitudes are at least this one; all as bits. */
static inline int count_from(const int32_t *magnitudes, int size, int32_t least) {
    int count = 0;
    for (int j = 0; j < size; j++) count += magnitudes[j] >= least;
    return count;
}

/* The indices of the largest of a sparse block, of equal ones the first, in ascending order. */
static inline void find_largest(const int32_t *restrict magnitudes, int kept, int32_t top,
                                int *restrict indices) {
    int32_t maxima[MOST_KEPT], found[SPARSE_BLOCK], low = top, high = top + 1;
    int at[SPARSE_BLOCK], size = 0, count = 0;
    /* Each of `kept` groups has a maximum, so none below the least of these is among the largest. */
    memcpy(maxima, magnitudes, sizeof *maxima * (size_t)kept);
    for (int start = kept; start < SPARSE_BLOCK; start += kept)
        for (int j = 0; j < kept; j++)
            maxima[j] = maxima[j] > magnitudes[start + j] ? maxima[j] : magnitudes[start + j];
    for (int j = 0; j < kept; j++) low = low < maxima[j] ? low : maxima[j];
    for (int j = 0; j < SPARSE_BLOCK; j++) {
        found[size] = magnitudes[j];
        at[size] = j;
        size += magnitudes[j] >= low;
    }
    /* At least `kept` are from `low` on, and fewer from `high` on. */
    while (high - low > 1 && count != kept) {
        int32_t middle = low + (high - low) / 2;
        count = count_from(found, size, middle);
        if (count >= kept)
            low = middle;
        else
            high = middle;
    }
    int equal = kept - count_from(found, size, low + 1), next = 0;
    for (int j = 0; j < size; j++)
        if (found[j] > low || (found[j] == low && equal-- > 0)) indices[next++] = at[j];
}

/* Write the row of a sparse block `y`; whether it is finite. */
static inline bool write_sparse(struct row row, const float *restrict y) {
    int32_t magnitudes[SPARSE_BLOCK];
    int indices[MOST_KEPT], counts[2] = {0, 0};
    float kept[MOST_KEPT], parts[MOST_KEPT];
    uint32_t top = largest(y, SPARSE_BLOCK);
    if (top >= INFINITE) return false;
    for (int j = 0; j < SPARSE_BLOCK; j++) magnitudes[j] = (int32_t)(bits_of(y[j]) & MAGNITUDE);
    find_largest(magnitudes, row.kept, (int32_t)top, indices);
    memset(row.indices, 0, (size_t)(row.kept * 7 / 4));
    for (int i = 0; i < row.kept; i++) {
        uint8_t *pair = row.indices + i / 2 * 3;
        pair[i % 2] |= (uint8_t)(i % 2 ? indices[i] << 4 : indices[i]);
        pair[i % 2 + 1] |= (uint8_t)(i % 2 ? indices[i] >> 4 : indices[i] >> 8);
        row.signs[i / 8] |= (uint8_t)((y[indices[i]] < 0) << i % 8);
        kept[i] = fabsf(y[indices[i]]);
        parts[i] = kept[i] / (float)row.kept;
    }
    float mean = halved(parts, row.kept);
    for (int i = 0; i < row.kept; i++) {
        bool is_larger = kept[i] >= mean;
        row.larger[i / 8] |= (uint8_t)(is_larger << i % 8);
        counts[is_larger]++;
    }
    for (int group = 0; group < 2; group++) {
        uint32_t cap = bits_of(MAX_FLOAT) >> 16, scale;
        for (int i = 0; i < row.kept; i++)
            parts[i] = (kept[i] >= mean) == group ? kept[i] / (float)counts[group] : 0;
        scale = to_bf16(halved(parts, row.kept));
        row.scales[group] = (uint16_t)(scale < cap ? scale : cap);
    }
    return true;
}

/* `diloco_encode` of a sparse form. */
static bool encode_sparse(enum form form, const float *values, const float *other, float sign,
                          ptrdiff_t elements, uint8_t *out, float *followed, uint64_t *sum,
                          uint32_t *top) {
    *sum = *top = 0;
    for (ptrdiff_t at = 0; at < elements; at += SPARSE_BLOCK) {
        ptrdiff_t size = least(SPARSE_BLOCK, elements - at);
        struct row row = row_of(form, out, at / SPARSE_BLOCK);
        float y[SPARSE_BLOCK];
        if (other)
            for (ptrdiff_t j = 0; j < size; j++) y[j] = values[at + j] + sign * other[at + j];
        else
            memcpy(y, values + at, 4 * (size_t)size);
        for (ptrdiff_t j = size; j < SPARSE_BLOCK; j++) y[j] = 0;
        if (!write_sparse(row, y)) return false;
        if (!followed) continue;
        read_sparse(row, 0, size, y);
        for (ptrdiff_t j = 0; j < size; j++) y[j] = other[at + j] + y[j];
        memcpy(followed + at, y, 4 * (size_t)size);
        *sum += bit_sum(y, size);
        uint32_t magnitude = largest(y, size);
        *top = *top > magnitude ? *top : magnitude;
    }
    return true;
}

/* Scales and codes (docs/codecs.md) of y = values + sign other; without `other`: of `values`.
 *
 * `followed`, unless NULL, receives other + D(y), where D(y) is what the codes say, `sum` its bit sum
 * and `top` the bits of its largest magnitude. It may be the memory of `values` or `other`.
 *
 * Returns whether y is finite; where it is not, nothing that was written is of use.
 */
bool diloco_encode(enum form form, bool is_rms, const float *values, const float *other,
                   float sign, ptrdiff_t elements, uint8_t *out, float *followed, uint64_t *sum,
                   uint32_t *top) {
    if (form >= SPARSE)
        return encode_sparse(form, values, other, sign, elements, out, followed, sum, top);
    ptrdiff_t blocks = (elements + BLOCK - 1) / BLOCK;
    u16 *scales = (u16 *)out;
    uint8_t *codes = out + 2 * blocks;
    const float most = form == INT8 ? 127 : 7;
    uint64_t found = 0;
    uint32_t above = 0;
    for (ptrdiff_t block = 0; block < blocks; block++) {
        ptrdiff_t at = block * BLOCK, size = least(BLOCK, elements - at);
        float y[BLOCK], rounded[BLOCK];
        prefetch(values + at);
        if (other) prefetch(other + at);
        if (other)
            for (ptrdiff_t j = 0; j < size; j++) y[j] = values[at + j] + sign * other[at + j];
        else
            memcpy(y, values + at, 4 * (size_t)size);
        for (ptrdiff_t j = size; j < BLOCK; j++) y[j] = 0;
        uint32_t magnitude = largest(y, BLOCK);
        if (magnitude >= INFINITE) {
            end_stream();
            return false;
        }
        uint32_t bits = scale_of(y, magnitude, most, is_rms);
        float scale = of_bits(bits << 16), by = scale > 0 ? scale : INFINITY;
        scales[block] = (uint16_t)bits;
        for (int j = 0; j < BLOCK; j++) {
            float code = rintf(y[j] / by);
            code = code < -most ? -most : code;
            rounded[j] = code > most ? most : code;
        }
        if (form == INT8) {
            for (int j = 0; j < BLOCK; j++) codes[at + j] = (uint8_t)(int32_t)rounded[j];
        } else {
            uint8_t whole[BLOCK];
            for (int j = 0; j < BLOCK; j++) whole[j] = (uint8_t)((int32_t)rounded[j] + 8);
            for (int j = 0; j < HALF; j++)
                codes[at / 2 + j] = (uint8_t)(whole[j] | whole[j + HALF] << 4);
        }
        if (!followed) continue;
        /* + 0: a decoder has no code -0. */
        for (ptrdiff_t j = 0; j < size; j++) y[j] = other[at + j] + (rounded[j] + 0.0f) * scale;
        if (followed == values || followed == other)
            memcpy(followed + at, y, 4 * (size_t)size);
        else
            stream(followed + at, y, size);
        found += bit_sum(y, size);
        magnitude = largest(y, size);
        above = above > magnitude ? above : magnitude;
    }
    end_stream();
    *sum = found;
    *top = above;
    return true;
}

/* out <- (values + other) + sign x, where x is a coded chunk; without `other`: values + sign x.
 *
 * `out` may be one of them. `sum` and `top` are as in `diloco_encode`.
 */
void diloco_shift(enum form form, const uint8_t *data, ptrdiff_t elements, const float *values,
                  const float *other, float sign, float *out, uint64_t *sum, uint32_t *top) {
    float total[PIECE], x[PIECE];
    uint64_t found = 0;
    uint32_t above = 0;
    for (ptrdiff_t at = 0; at < elements; at += PIECE) {
        ptrdiff_t size = least(PIECE, elements - at);
        read(form, data, elements, at, size, x);
        if (other)
            for (ptrdiff_t j = 0; j < size; j++)
                total[j] = (values[at + j] + other[at + j]) + sign * x[j];
        else
            for (ptrdiff_t j = 0; j < size; j++) total[j] = values[at + j] + sign * x[j];
        if (out == values)
            memcpy(out + at, total, 4 * (size_t)size);
        else
            stream(out + at, total, size);
        found += bit_sum(total, size);
        uint32_t magnitude = largest(total, size);
        above = above > magnitude ? above : magnitude;
    }
    end_stream();
    *sum = found;
    *top = above;
}

/* Write parameters, and the same in a wire form of 16 bits where there is one. */
static inline void store(const float *values, ptrdiff_t at, ptrdiff_t size, float *moved,
                         enum form form, void *wire) {
    stream(moved + at, values, size);
    if (form == BF16)
        for (ptrdiff_t j = 0; j < size; j++) ((u16 *)wire)[at + j] = (uint16_t)to_bf16(values[j]);
    else if (form == FP16)
        for (ptrdiff_t j = 0; j < size; j++) ((u16 *)wire)[at + j] = to_fp16(values[j]);
}

/* One step of SGD with momentum (`outer.chunked.Nesterov`), where g is the terms' mean:
 *
 *     m' <- mu m + g;   theta' <- theta - lr (g + mu m')     Nesterov
 *                       theta' <- theta - lr m'              classical
 *
 * Without `after`, memory for m', there is no momentum; without `momentum` it begins with g.
 *
 * Returns the bits of the largest magnitude of theta'.
 */
uint32_t diloco_nesterov(const struct term *terms, ptrdiff_t count, float divisor, ptrdiff_t elements,
                         const float *theta, const float *momentum, float mu, float lr, bool is_nesterov,
                         float *moved, float *after, enum form form, void *wire) {
    float g[PIECE], room[PIECE];
    uint32_t above = 0;
    for (ptrdiff_t at = 0; at < elements; at += PIECE) {
        ptrdiff_t size = least(PIECE, elements - at);
        summed(terms, count, divisor, elements, at, size, g, room);
        if (after) {
            if (momentum)
                for (ptrdiff_t j = 0; j < size; j++) room[j] = momentum[at + j] * mu + g[j];
            else
                memcpy(room, g, 4 * (size_t)size);
            stream(after + at, room, size);
            if (is_nesterov)
                for (ptrdiff_t j = 0; j < size; j++) g[j] = fmaf(room[j], mu, g[j]);
            else
                memcpy(g, room, 4 * (size_t)size);
        }
        for (ptrdiff_t j = 0; j < size; j++) g[j] = fmaf(g[j], -lr, theta[at + j]);
        store(g, at, size, moved, form, wire);
        uint32_t magnitude = largest(g, size);
        above = above > magnitude ? above : magnitude;
    }
    end_stream();
    return above;
}

/* One step of Delayed Nesterov (`outer.chunked.DelayedNesterov`), where g is the terms' mean and D the
 * sum of the gradients in the buffer, NULL where it is empty:
 *
 *     D' <- D + g;   at a boundary (`size_of_buffer` > 0): m' <- mu m + D' / size_of_buffer
 *     theta' <- (theta - g_rate g) - m_rate m'
 *
 * The last term is left out unless `has_m`. `kept` receives m' at a boundary, else D'. Without
 * `momentum` m is 0; without a boundary m' is m.
 *
 * Returns the bits of the largest magnitude of theta', at least INFINITE where D' is not finite.
 */
uint32_t diloco_delayed(const struct term *terms, ptrdiff_t count, float divisor, ptrdiff_t elements,
                        const float *theta, const float *delayed, const float *momentum, float mu,
                        float size_of_buffer, float g_rate, float m_rate, bool has_m, float *moved,
                        float *kept, enum form form, void *wire) {
    float g[PIECE], m[PIECE];
    uint32_t above = 0;
    for (ptrdiff_t at = 0; at < elements; at += PIECE) {
        ptrdiff_t size = least(PIECE, elements - at);
        summed(terms, count, divisor, elements, at, size, g, m);
        if (delayed)
            for (ptrdiff_t j = 0; j < size; j++) m[j] = delayed[at + j] + g[j];
        else
            memcpy(m, g, 4 * (size_t)size);
        if (size_of_buffer > 0) {
            for (ptrdiff_t j = 0; j < size; j++) m[j] /= size_of_buffer;
            if (momentum)
                for (ptrdiff_t j = 0; j < size; j++) m[j] = fmaf(momentum[at + j], mu, m[j]);
        } else if (largest(m, size) >= INFINITE) {
            above = INFINITE;
        }
        stream(kept + at, m, size);
        for (ptrdiff_t j = 0; j < size; j++) g[j] = fmaf(g[j], -g_rate, theta[at + j]);
        if (has_m) {
            if (size_of_buffer > 0)
                for (ptrdiff_t j = 0; j < size; j++) g[j] = fmaf(m[j], -m_rate, g[j]);
            else if (momentum)
                for (ptrdiff_t j = 0; j < size; j++) g[j] = fmaf(momentum[at + j], -m_rate, g[j]);
        }
        store(g, at, size, moved, form, wire);
        uint32_t magnitude = largest(g, size);
        above = above > magnitude ? above : magnitude;
    }
    end_stream();
    return above;
}
