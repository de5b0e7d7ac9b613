// Vectors of the machine's width, written with the compiler's vector types; small matrix products
// on them; loading, storing and transposing. Nothing here knows about attention.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16, PANEL = 4;  // floats in a vector, vectors in a panel of columns
#elif defined(__AVX__)
constexpr int W = 8, PANEL = 2;
#else
constexpr int W = 4, PANEL = 4;
#endif
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
constexpr int ROWS = 6;    // of a tile: ROWS x PANEL sums stay in registers
constexpr int LINES = 16;  // of memory asked for ahead with each tile

typedef float Vec __attribute__((vector_size(W * 4)));
typedef float Loose __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(W * 4)));

static inline Vec load(const float* p) { return *(const Loose*)p; }
static inline void store(float* p, Vec v) { *(Loose*)p = v; }

// Stores what nobody reads soon: past the caches, without reading the line first.
static inline void stream(float* p, Vec v) {
#if defined(__AVX512F__)
  if ((uintptr_t)p % sizeof(Vec) == 0) return _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
  if ((uintptr_t)p % sizeof(Vec) == 0) return _mm256_stream_ps(p, (__m256)v);
#endif
  store(p, v);
}

static inline Vec all(float x) { return Vec{} + x; }
static inline Vec choose(Ints mask, Vec a, Vec b) { return mask ? a : b; }
static inline Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }

// Lane l of the other half of each group of 2 * STEP lanes.
template <int STEP>
static inline Vec across(Vec v) {
  Ints by;
  for (int l = 0; l < W; l++) by[l] = l ^ STEP;
  return __builtin_shuffle(v, by);
}

static inline float sum(Vec v) {
  if (W > 8) v += across<(W > 8 ? 8 : 1)>(v);
  if (W > 4) v += across<(W > 4 ? 4 : 1)>(v);
  v += across<2>(v);
  v += across<1>(v);
  return v[0];
}

static inline float top(Vec v) {
  if (W > 8) v = larger(v, across<(W > 8 ? 8 : 1)>(v));
  if (W > 4) v = larger(v, across<(W > 4 ? 4 : 1)>(v));
  v = larger(v, across<2>(v));
  v = larger(v, across<1>(v));
  return v[0];
}

// 2^x for x <= 0, within 1.5 roundings; 0 from 2^-126 down, since a subnormal costs a hundred others;
// NaN stays NaN. On [-1/2, 1/2] a polynomial with p(0) = 1, the best of degree 6 in relative error: 2.0e-9.
static inline Vec exp2(Vec x) {
#if defined(__AVX512F__)  // rounds and scales in an instruction each
  const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Vec magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = x + magic, n = shifted - magic;
#endif
  const Vec f = x - n;
  Vec p = all(1.535336199e-4f);
  p = p * f + 1.339887445e-3f;
  p = p * f + 9.618437358e-3f;
  p = p * f + 5.550332471e-2f;
  p = p * f + 2.402264791e-1f;
  p = p * f + 6.931472029e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_scalef_ps(there, (__m512)p, (__m512)n);
#else
  Ints bits, power;
  std::memcpy(&bits, &p, sizeof p);
  std::memcpy(&power, &shifted, sizeof shifted);
  bits += power << 23;
  std::memcpy(&p, &bits, sizeof p);
  return choose(x == x, choose(x <= all(-126.0f), Vec{}, p), x);  // NaN's bits would be an exponent
#endif
}

// ---- products -----------------------------------------------------------------------------

// Memory that will be needed next, asked for a little with each tile: by the time it is read it
// has come nearer, and the products have not waited.
struct Ahead {
  struct Range {
    const char *at, *end;
  } ranges[3];
  int last = -1;

  void add(const void* p, int64_t bytes) {
    if (last < 2) ranges[++last] = {(const char*)p, (const char*)p + bytes};
  }
  void some(int lines) {
    while (lines-- > 0 && last >= 0) {
      Range& r = ranges[last];
      __builtin_prefetch(r.at, 0, 2);
      if ((r.at += 64) >= r.end) last--;
    }
  }
};

static thread_local Ahead ahead;

// C (R x NV vectors) = or += A B over k terms; A's element (i, p) is a[i*rows + p*columns].
template <int R, int NV, bool ADD, bool TURNED>
static inline void tile(long k, const float* a, long rows, long columns, const float* b, long ldb,
                        float* c, long ldc) {
  Vec s[R][NV];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) s[i][j] = ADD ? load(c + i * ldc + j * W) : Vec{};
  const float* row[R];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++) row[i] = a + i * rows;
  for (long p = 0; p < k; p++) {
    Vec v[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) v[j] = load(b + p * ldb + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) {
      float x = TURNED ? a[p * columns + i] : row[i][p];
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) s[i][j] += x * v[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) store(c + i * ldc + j * W, s[i][j]);
}

template <int NV, bool ADD, bool TURNED>
static void column(long m, long k, const float* a, long lda, const float* b, long ldb, float* c,
                   long ldc) {
  const long rows = TURNED ? 1 : lda;
  long i = 0;
  for (; i + ROWS <= m; i += ROWS) {
    ahead.some(LINES);
    tile<ROWS, NV, ADD, TURNED>(k, a + i * rows, rows, lda, b, ldb, c + i * ldc, ldc);
  }
  for (; i + 2 <= m; i += 2)
    tile<2, NV, ADD, TURNED>(k, a + i * rows, rows, lda, b, ldb, c + i * ldc, ldc);
  if (i < m) tile<1, NV, ADD, TURNED>(k, a + i * rows, rows, lda, b, ldb, c + i * ldc, ldc);
}

// C (m x n) = or += A B; n is a multiple of W. TURNED: A is stored (k x m), else (m x k).
template <bool ADD, bool TURNED>
static void product(long m, long n, long k, const float* a, long lda, const float* b, long ldb,
                    float* c, long ldc) {
  long j = 0;
  for (; j + PANEL * W <= n; j += PANEL * W)
    column<PANEL, ADD, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc);
  for (; j + 2 * W <= n; j += 2 * W) column<2, ADD, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc);
  for (; j < n; j += W) column<1, ADD, TURNED>(m, k, a, lda, b + j, ldb, c + j, ldc);
}

// ---- layout -------------------------------------------------------------------------------

static inline long padded(long n) { return (n + W - 1) / W * W; }

// Floats from one row of n to the next: an odd number of cache lines, so that the rows of a
// column do not fall into the same few sets.
static inline long pitch(long n) {
  long lines = (padded(n) + 15) / 16;
  return (lines | 1) * 16;
}

// The two shuffles of a butterfly between vectors STEP apart.
template <int STEP>
struct Butterfly {
  Ints low, high;
  constexpr Butterfly() : low(), high() {
    for (int l = 0; l < W; l++) {
      low[l] = l & STEP ? W + l - STEP : l;
      high[l] = l & STEP ? W + l : l + STEP;
    }
  }
};

template <int STEP>
static inline void exchange(Vec* v) {
  static const Butterfly<STEP> by;
#pragma GCC unroll 16
  for (int r = 0; r < W; r++)
    if (!(r & STEP)) {
      const Vec x = v[r], y = v[r + STEP];
      v[r] = __builtin_shuffle(x, y, by.low);
      v[r + STEP] = __builtin_shuffle(x, y, by.high);
    }
}

// b (columns x rows) = a (rows x columns) transposed; rows are filled up with zeros to a multiple
// of W. Vectors of a may reach behind its last column.
static void transpose(long rows, long columns, const float* a, long lda, float* b, long ldb) {
  for (long i = 0; i < rows; i += W) {
    const int n = (int)(rows - i < W ? rows - i : W);
    for (long j = 0; j < columns; j += W) {
      Vec v[W];
#pragma GCC unroll 16
      for (int r = 0; r < W; r++) v[r] = r < n ? load(a + (i + r) * lda + j) : Vec{};
      exchange<1>(v);
      exchange<2>(v);
      if (W > 4) exchange<(W > 4 ? 4 : 1)>(v);
      if (W > 8) exchange<(W > 8 ? 8 : 1)>(v);
      const int m = (int)(columns - j < W ? columns - j : W);
      if (m == W) {
#pragma GCC unroll 16
        for (int r = 0; r < W; r++) store(b + (j + r) * ldb + i, v[r]);
      } else {
        for (int r = 0; r < m; r++) store(b + (j + r) * ldb + i, v[r]);
      }
    }
  }
}

// ---- numbers of other widths --------------------------------------------------------------

enum Type { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

static inline float of_bfloat16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

static inline uint16_t to_bfloat16(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return x == x ? (uint16_t)rounded : (uint16_t)(bits >> 16 | 64);
}

// n contiguous numbers of 16 bits with a fraction of 10, to and from floats.
static inline void of_float16(float* to, const _Float16* x, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(x + i))));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(x + i))));
#endif
  for (; i < n; i++) to[i] = (float)x[i];
}

static inline void to_float16(_Float16* to, const float* x, int64_t n) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    _mm256_storeu_si256((__m256i*)(to + i),
                        _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128((__m128i*)(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) to[i] = (_Float16)x[i];
}

// Row of n floats from p, whose elements lie `step` apart.
static inline void read_row(float* to, const void* p, int type, long at, long step, long n) {
  if (type == FLOAT32) {
    const float* x = (const float*)p + at;
    if (step == 1)
      std::memcpy(to, x, n * sizeof(float));
    else
      for (long i = 0; i < n; i++) to[i] = x[i * step];
  } else if (type == BFLOAT16) {
    const uint16_t* x = (const uint16_t*)p + at;
    if (step == 1)
      for (long i = 0; i < n; i++) to[i] = of_bfloat16(x[i]);
    else
      for (long i = 0; i < n; i++) to[i] = of_bfloat16(x[i * step]);
  } else {
    const _Float16* x = (const _Float16*)p + at;
    if (step == 1)
      of_float16(to, x, n);
    else
      for (long i = 0; i < n; i++) to[i] = (float)x[i * step];
  }
}

// n floats to a contiguous row.
static inline void write_row(void* p, int type, long at, const float* from, long n) {
  if (type == FLOAT32) {
    std::memcpy((float*)p + at, from, n * sizeof(float));
  } else if (type == BFLOAT16) {
    uint16_t* x = (uint16_t*)p + at;
    for (long i = 0; i < n; i++) x[i] = to_bfloat16(from[i]);
  } else {
    to_float16((_Float16*)p + at, from, n);
  }
}
