// Linear attention in chunks, forward and backward: the algorithm of `subquad/kernels/linear.py`
// with its three phases, in which the features of a chunk stay in the cache of one core.
//
// A row is a batch row and key-value head; rows are independent and divided among threads. A row's
// scratch has padded widths: columns behind D, V or M are zeros, so that nothing below asks for
// widths. phi is 2^(u - c) or an activation of u = x W + b.

#include <algorithm>
#include <atomic>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr float EMPTY = -1e30f;
constexpr float NOWHERE = 2 * EMPTY;  // level of the columns behind M: their features are 0
constexpr float TINY = 5.421010862427522e-20f;  // 2^-64
constexpr float RELU_EPSILON = 1e-3f;

enum Activation { EXP = 0, RELU = 1, ELU = 2 };

}  // namespace

extern "C" {

// One tensor (B, heads, n, width): element (b, h, i, d) is data[b*batch + h*head + i*token + d*last].
struct Tensor {
  void* data;
  int64_t batch, head, token, last;
  int32_t type, unused;
};

// phi = activation((x W + b) * unit): element (b, h, d, r) of W is w[b*batch + h*head + d*width +
// r*feature], where batch is 0 for a W that all batch rows have.
struct Side {
  const float *w, *bias;    // bias: null, or element (b, h, r) in the same way
  float *w_bar, *bias_bar;  // gradients, (N, D, R) and (N, R); null where nobody asks
  int64_t batch, head, width, feature;
  int64_t bias_batch, bias_head, bias_feature;
  float unit;  // log2(e) for exponential maps, or 1 where W and b are in base 2 already
  int32_t unused;
};

struct Call {
  Tensor q, k, v, out, out_bar, q_bar, k_bar, v_bar;
  Side query, key;
  float *den, *scale;                // (N, G, L)
  const float *den_bar, *key_bias;   // (N, G, L), (N, S); may be null
  const uint8_t* open;               // (B, S), may be null
  float *bias_bar;                   // (N, S), may be null
  const float *s_in, *z_in, *c_in, *mass_in;  // state (N, M, V), (N, M), (N, M or 1), (N), or null
  float *s, *z, *c, *mass;                    // the new one
  float *s_history, *z_history, *c_history;
  float *s_bar, *z_bar;              // (N, M, V), (N, M): in and out
  int64_t batch, kv, groups, queries, keys, features, q_width, value;
  int64_t absorb, answered, keep, chunk, causal_chunk;
  float quad;
  int32_t activation, threads;
};

}  // extern "C"

namespace {

// ---- memory ---------------------------------------------------------------------------------

// Rows of floats: a tensor's own where they can be read as they are, or a copy of them.
struct Rows {
  const float* data;
  int64_t pitch;
  const float* operator[](int64_t r) const { return data + r * pitch; }
};

// ---- one row --------------------------------------------------------------------------------

class Row {
 public:
  Row(const Call& call, int64_t n, bool training)
      : call(call),
        n(n),
        b(n / call.kv),
        h(n % call.kv),
        D(call.q_width),
        V(call.value),
        M(call.features),
        most(std::max(call.chunk, call.causal_chunk)),
        ld(pitch(D)),
        lv(pitch(V)),
        lm(pitch(M)),
        lt(pitch(call.causal_chunk)),
        wide_d(padded(D)),
        wide_v(padded(V)),
        wide_m(padded(M)),
        in_place(!training && call.queries + call.keys < 64 && ready(call.query) && ready(call.key)),
        one_map(same(call.query, call.key)),
        room([&](Room& r) { lay(r, training); }) {
    pk = pks;
    lwq = lwk = lm;
    if (in_place) {
      wq = own(call.query), lwq = call.query.width;
      wk = own(call.key), lwk = call.key.width;
      clear(bq, wide_m);
      clear(bk, wide_m);
    } else {
      fill(call.query, wq_copy, bq, training ? wq_t : nullptr);
      if (one_map) {
        wk_copy = wq_copy, wk_t = wq_t;
        std::memcpy(bk, bq, wide_m * sizeof(float));
      } else {
        fill(call.key, wk_copy, bk, training ? wk_t : nullptr);
      }
      wq = wq_copy, wk = wk_copy;
    }
    if (exponential()) std::fill(bk + M, bk + wide_m, NOWHERE);
  }

  // -- the state

  void begin(const float* s_in, const float* z_in, const float* c_in, const float* mass_in) {
    if (!s_in) return empty();
    const float* s0 = s_in + n * M * V;
    for (int64_t m = 0; m < M; m++) {
      std::memcpy(s + m * lv, s0 + m * V, V * sizeof(float));
      clear(s + m * lv + V, lv - V);
    }
    for (int64_t m = M; m < wide_m; m++) clear(s + m * lv, lv);
    clear(z, wide_m);
    std::memcpy(z, z_in + n * M, M * sizeof(float));
    for (int64_t m = 0; m < wide_m; m++)
      c[m] = exponential() ? m < M ? c_in[n * M + m] : NOWHERE : 0.0f;
    mass = mass_in[n];
  }

  void begin() { begin(call.s_in, call.z_in, call.c_in, call.mass_in); }

  // What `begin` does, without S.
  void begin_sums() {
    for (int64_t m = 0; m < wide_m; m++)
      c[m] = !exponential() ? 0.0f : m >= M ? NOWHERE : call.c_in ? call.c_in[n * M + m] : EMPTY;
    clear(z, wide_m);
    if (call.z_in) std::memcpy(z, call.z_in + n * M, M * sizeof(float));
    mass = call.mass_in ? call.mass_in[n] : 0.0f;
  }

  void empty() {
    for (int64_t m = 0; m < wide_m; m++) clear(s + m * lv, lv);
    clear(z, wide_m);
    for (int64_t m = 0; m < wide_m; m++) c[m] = exponential() ? m < M ? EMPTY : NOWHERE : 0.0f;
    mass = 0;
  }

  void end() {
    if (!call.s) return;  // nobody asked for it
    keep_state(call.s + n * M * V, call.z + n * M, exponential() ? call.c + n * M : nullptr);
    if (!exponential()) call.c[n] = 0;
    call.mass[n] = mass;
  }

  void keep_state(float* to_s, float* to_z, float* to_c) const {
    for (int64_t m = 0; m < M; m++)
      std::memcpy(to_s + m * V, s + m * lv, V * sizeof(float));
    std::memcpy(to_z, z, M * sizeof(float));
    if (to_c) std::memcpy(to_c, c, M * sizeof(float));
  }

  // Adds another row's state, which is left as it is.
  void merge(const float* s2, const float* z2, const float* c2, float mass2) {
    for (int64_t m = 0; m < M; m++) {
      float mine = 1, theirs = 1;
      if (exponential()) {
        float level = std::max(c[m], c2[m]);
        mine = std::exp2(c[m] - level), theirs = std::exp2(c2[m] - level);
        c[m] = level;
      }
      for (int64_t j = 0; j < wide_v; j += W)
        store(s + m * lv + j, load(s + m * lv + j) * mine + load(s2 + m * lv + j) * theirs);
      z[m] = z[m] * mine + z2[m] * theirs;
    }
    mass += mass2;
  }

  // -- phase 1: keys i..j enter the state

  void absorb(int64_t i, int64_t j) {
    for (; i < j; i += call.chunk) {
      int64_t t = std::min(call.chunk, j - i);
      keys(i, t);
      soon(call.k, h, i + t, call.chunk, j, D);
      soon(call.v, h, i + t, call.chunk, j, V);
      key_features(t);
      rescale(c, s, z);
      swap_level();
      enter(t);
    }
  }

  // -- phase 2: queries i..j read the state

  void read(int64_t i, int64_t j) {
    for (int64_t g = 0; g < call.groups; g++)
      for (int64_t from = i; from < j; from += call.chunk) {
        int64_t t = std::min(call.chunk, j - from);
        queries(g, from, t);
        soon(call.q, h * call.groups + g, from + t, call.chunk, j, D);
        query_features(t, c);
        for (int64_t r = 0; r < t; r++) den[r] = dot(pq + r * lm, z, wide_m);
        product<false, false>(t, wide_v, wide_m, pq, lm, s, lv, num, lv);
        answer(g, from, t);
      }
  }

  // -- phase 3: keys and their queries walk together; false where a row underflows

  bool causal(int64_t i, int64_t j) {
    const int64_t first = call.absorb;
    for (; i < j; i += call.causal_chunk) {
      int64_t t = std::min(call.causal_chunk, j - i);
      if (call.keep && (i - first) % call.keep == 0) {
        int64_t at = (i - first) / call.keep * call.batch * call.kv + n;
        keep_state(call.s_history + at * M * V, call.z_history + at * M,
                   exponential() ? call.c_history + at * M : nullptr);
        if (!exponential()) call.c_history[at] = 0;
      }
      keys(i, t);
      soon(call.k, h, i + t, call.causal_chunk, j, D);
      soon(call.v, h, i + t, call.causal_chunk, j, V);
      key_features(t);
      bool empty = level_is_empty();
      rescale(c, s, z);
      swap_level();
      transpose(t, wide_m, pk, lm, pk_t, lt);
      for (int64_t g = 0; g < call.groups; g++) {
        int64_t from = i + call.answered - call.absorb;
        queries(g, from, t);
        soon(call.q, h * call.groups + g, from + t, call.causal_chunk, call.queries, D);
        query_features(t, c);
        triangle(t, pq, lm, wide_m, pk_t, inner);
        product<false, false>(t, wide_v, wide_m, pq, lm, s, lv, num, lv);
        bool seen = !empty;
        for (int64_t r = 0; r < t; r++) {
          Vec total{};
          for (int64_t u = 0; u <= r; u += W) total += load(inner + r * lt + u);
          den[r] = sum(total) + dot(pq + r * lm, z, wide_m);
          seen = seen || !closed[r];
          if (exponential() && seen && den[r] < TINY) return false;
        }
        below(t, wide_v, inner, y.data, y.pitch, num, lv);
        answer(g, from, t);
      }
      if (i + t < call.keys || call.s) enter(t);
    }
    return true;
  }

  // A query's features p read a state `from` (M x V) once; a key `enters` it on the way, into `to`.
  // V is a multiple of W.
  template <bool enters>
  void sweep(const float* from, float* to, const float* p, float* out) {
    int64_t j = 0;
    for (; j + 4 * W <= V; j += 4 * W) columns<4, enters>(j, from, to, p, out);
    for (; j < V; j += W) columns<1, enters>(j, from, to, p, out);
  }

  template <int N, bool enters>
  void columns(int64_t j, const float* from, float* to, const float* p, float* out) {
    Vec total[2][N] = {}, value[N] = {};
    if (enters)
      for (int i = 0; i < N; i++) value[i] = load(y.data + j + i * W);
    const auto row = [&](int64_t m, Vec* sums) {
      const Vec weight = all(p[m]), key = enters ? all(pk[m]) : Vec{}, decay = enters ? all(fading[m]) : Vec{};
      for (int i = 0; i < N; i++) {
        const int64_t at = m * V + j + i * W;
        Vec x = load(from + at);
        if (enters) {
          x = x * decay + value[i] * key;
          store(to + at, x);
        }
        sums[i] += x * weight;
      }
    };
    for (int64_t m = 0; m + 1 < M; m += 2) row(m, total[0]), row(m + 1, total[1]);
    if (M % 2) row(M - 1, total[0]);
    for (int i = 0; i < N; i++) store(out + j + i * W, total[0][i] + total[1][i]);
  }

  // One token, the step of decoding, in one pass over the state, which may be written where it was
  // read; false where the token's answer underflows: the state is right nevertheless.
  bool one() {
    begin_sums();
    const bool empty = level_is_empty();
    bool fine = true;
    keys(0, 1);
    key_features(1);
    for (int64_t m = 0; m < wide_m; m += W) {
      const Vec d = exponential() ? exp2(load(c + m) - load(level + m)) : all(1.0f);
      store(fading + m, d);
      store(z + m, load(z + m) * d + load(pk + m));
    }
    swap_level();
    float* to = call.s + n * M * V;
    const float* from = call.s_in ? call.s_in + n * M * V : to;
    if (!call.s_in) clear(to, M * V);
    for (int64_t g = 0; g < call.groups; g++) {
      queries(g, 0, 1);
      query_features(1, c);
      den[0] = dot(pq, z, wide_m);
      if (exponential() && den[0] < TINY && (!empty || closed[0] == 0)) fine = false;
      if (g == 0)
        sweep<true>(from, to, pq, num);
      else
        sweep<false>(to, nullptr, pq, num);
      answer(g, 0, 1);
    }
    std::memcpy(call.z + n * M, z, M * sizeof(float));
    if (exponential())
      std::memcpy(call.c + n * M, c, M * sizeof(float));
    else
      call.c[n] = 0;
    call.mass[n] = mass;
    return fine;
  }

  // Few queries of a state without new keys, which is read where it lies.
  void look() {
    begin_sums();
    const float* from = call.s_in + n * M * V;
    for (int64_t g = 0; g < call.groups; g++) {
      queries(g, 0, call.queries);
      query_features(call.queries, c);
      for (int64_t r = 0; r < call.queries; r++) {
        const float* p = pq + r * lm;
        den[r] = dot(p, z, wide_m);
        sweep<false>(from, nullptr, p, num + r * lv);
      }
      answer(g, 0, call.queries);
    }
  }

  // -- backward

  // Queries i..j of phase 2, to whose state s_t, the transposed one, belongs.
  void read_backward(int64_t i, int64_t j) {
    transpose(M, wide_v, s, lv, s_t, lm);
    for (int64_t g = 0; g < call.groups; g++)
      for (int64_t from = i; from < j; from += call.chunk) {
        int64_t t = std::min(call.chunk, j - from);
        queries(g, from, t);
        outer(g, from, t);
        query_features_at(g, from, t, c);
        product<false, false>(t, wide_m, wide_v, gr, lv, s_t, lm, bar, lm);
        for (int64_t r = 0; r < t; r++) {
          const float d = delta[r];
          for (int64_t m = 0; m < wide_m; m += W) {
            Vec x = load(bar + r * lm + m) + d * load(z + m), phi = load(pq + r * lm + m);
            store(bar + r * lm + m, exponential() ? x * phi : x);
            store(z_bar + m, load(z_bar + m) + d * phi);
          }
        }
        product<true, true>(M, wide_v, t, pq, lm, gr, lv, s_bar, lv);
        query_pullback(g, from, t);
      }
  }

  void absorb_backward(int64_t i, int64_t j) {
    transpose(M, wide_v, s_bar, lv, s_bar_t, lm);
    for (; i < j; i += call.chunk) {
      int64_t t = std::min(call.chunk, j - i);
      keys(i, t);
      key_features_again(t);
      product<false, false>(t, wide_m, wide_v, y.data, y.pitch, s_bar_t, lm, key_bar, lm);
      const Target values = target(call.v_bar, h, i, V, num, lv);
      product<false, false>(t, wide_v, wide_m, pk, lm, s_bar, lv, values.data, values.pitch);
      for (int64_t r = 0; r < t; r++)
        for (int64_t m = 0; m < wide_m; m += W) {
          Vec x = load(key_bar + r * lm + m) + load(z_bar + m);
          store(key_bar + r * lm + m, exponential() ? x * load(pk + r * lm + m) : x);
        }
      key_pullback(i, t, values);
    }
  }

  // The causal keys, from the last kept state to the first. s_bar and z_bar arrive at the scale
  // `c` of the final state and leave at that of the state before.
  void causal_backward() {
    const int64_t begin = call.absorb, C = call.causal_chunk, one = M * lv + 2 * wide_m;
    const int64_t kept = (call.keys - begin + call.keep - 1) / call.keep;
    for (int64_t m = 0; m < wide_m; m++) after[m] = c[m];
    for (int64_t k = kept - 1; k >= 0; k--) {
      const int64_t from = begin + k * call.keep;
      const int64_t to = std::min(from + call.keep, call.keys);
      const int64_t at = k * call.batch * call.kv + n;
      for (int64_t m = 0; m < M; m++) {
        std::memcpy(s + m * lv, call.s_history + (at * M + m) * V, V * sizeof(float));
        clear(s + m * lv + V, lv - V);
      }
      std::memcpy(z, call.z_history + at * M, M * sizeof(float));
      for (int64_t m = 0; m < M; m++) c[m] = exponential() ? call.c_history[at * M + m] : 0;
      int64_t chunks = (to - from + C - 1) / C;
      for (int64_t x = 0;; x++) {  // the states between the kept ones are made again
        std::memcpy(states + x * one, s, M * lv * sizeof(float));
        std::memcpy(states + x * one + M * lv, z, wide_m * sizeof(float));
        std::memcpy(states + x * one + M * lv + wide_m, c,
                    wide_m * sizeof(float));
        const int64_t t = std::min(C, to - from - x * C);
        pk = pks + x * C * lm;
        keys(from + x * C, t);
        key_features(t);
        if (x + 1 == chunks) break;
        rescale(c, s, z);
        swap_level();
        enter(t);
      }
      for (int64_t x = chunks - 1; x >= 0; x--) {
        const float* held = states + x * one;
        std::memcpy(s, held, M * lv * sizeof(float));
        std::memcpy(z, held + M * lv, wide_m * sizeof(float));
        std::memcpy(c, held + M * lv + wide_m, wide_m * sizeof(float));
        pk = pks + x * C * lm;
        causal_chunk_backward(from + x * C, std::min(C, to - from - x * C));
        std::memcpy(after, c, wide_m * sizeof(float));
      }
    }
    pk = pks;
  }

  void begin_backward() {
    begin(call.s, call.z, call.c, call.mass);
    for (int64_t m = 0; m < M; m++) {
      std::memcpy(s_bar + m * lv, call.s_bar + (n * M + m) * V, V * sizeof(float));
      clear(s_bar + m * lv + V, lv - V);
    }
    for (int64_t m = M; m < wide_m; m++) clear(s_bar + m * lv, lv);
    clear(z_bar, wide_m);
    std::memcpy(z_bar, call.z_bar + n * M, M * sizeof(float));
    if (call.query.w_bar)
      for (int64_t d = 0; d < D; d++) clear(wq_bar + d * lm, wide_m);
    if (call.key.w_bar)
      for (int64_t d = 0; d < D; d++) clear(wk_bar + d * lm, wide_m);
    clear(bq_bar, wide_m);
    clear(bk_bar, wide_m);
  }

  // The state that queries of phase 2 read and that keys of phase 1 made.
  void first_state() {
    if (call.absorb >= call.keys) return;  // the final one, which is there
    for (int64_t m = 0; m < M; m++) {
      std::memcpy(s + m * lv, call.s_history + (n * M + m) * V, V * sizeof(float));
      clear(s + m * lv + V, lv - V);
    }
    std::memcpy(z, call.z_history + n * M, M * sizeof(float));
    for (int64_t m = 0; m < M; m++) c[m] = exponential() ? call.c_history[n * M + m] : 0;
  }

  void end_backward() {
    for (int64_t m = 0; m < M; m++)
      std::memcpy(call.s_bar + (n * M + m) * V, s_bar + m * lv, V * sizeof(float));
    std::memcpy(call.z_bar + n * M, z_bar, M * sizeof(float));
    give(call.query, wq_bar, bq_bar);
    give(call.key, wk_bar, bk_bar);
  }

  const float* state_s() const { return s; }
  const float* state_z() const { return z; }
  const float* state_c() const { return c; }
  float state_mass() const { return mass; }

 private:
  const Call& call;
  const int64_t n, b, h, D, V, M, most, ld, lv, lm, lt, wide_d, wide_v, wide_m;
  const bool in_place;  // a few tokens read W where it is: to copy it would be most of the work
  const bool one_map;   // of queries and keys
  const float *wq, *wk;
  int64_t lwq, lwk;
  float *wq_copy, *wk_copy, *wq_t, *wk_t, *bq, *bk, *s, *z, *c, *level, *s_t, *s_bar, *s_bar_t, *z_bar, *after;
  float *x_copy, *xk_copy, *y_copy, *o_copy, *pq, *pk, *pks, *pk_t, *num, *den, *scale, *weight, *closed, *inner, *pair, *y_t;
  float *gr, *delta, *bar, *key_bar, *x_bar, *states, *wq_bar, *wk_bar, *bq_bar, *bk_bar, *fading;
  Rows x, xk, y;  // of the chunk: queries, keys, values
  float mass = 0;
  Room room;

  bool exponential() const { return call.activation == EXP; }

  static void clear(float* p, int64_t floats) {
    if (floats > 0) std::memset(p, 0, floats * sizeof(float));
  }

  // Rows of phi_k at a time: those of a chunk, or between two kept states.
  int64_t held(bool training) const {
    return std::max(most + ROWS, training && call.absorb < call.keys ? call.keep + ROWS : 0);
  }

  void lay(Room& r, bool training) {
    const int64_t T = most + ROWS, C = call.causal_chunk + W;
    r.take(wq_copy, in_place ? 0 : wide_d * lm), r.take(wk_copy, in_place || one_map ? 0 : wide_d * lm);
    r.take(bq, wide_m), r.take(bk, wide_m), r.take(fading, wide_m);
    r.take(s, wide_m * lv), r.take(z, wide_m), r.take(c, wide_m), r.take(level, wide_m);
    r.take(x_copy, T * ld), r.take(xk_copy, T * ld), r.take(y_copy, T * lv);
    r.take(pq, std::max(T * lm, wide_m * ld));
    r.take(pks, held(training) * lm), r.take(num, T * lv), r.take(den, T), r.take(scale, T);
    r.take(weight, T), r.take(closed, T);
    if (call.absorb < call.keys) {
      r.take(pk_t, wide_m * lt), r.take(inner, C * lt);
      if (training) r.take(pair, C * lt), r.take(y_t, wide_v * lt);
    }
    if (!training) return;
    r.take(wq_t, wide_m * ld), r.take(wk_t, one_map ? 0 : wide_m * ld), r.take(s_t, wide_v * lm);
    r.take(s_bar, wide_m * lv), r.take(s_bar_t, wide_v * lm), r.take(z_bar, wide_m);
    r.take(after, wide_m), r.take(gr, T * lv), r.take(o_copy, T * lv), r.take(delta, T);
    r.take(bar, T * lm), r.take(key_bar, T * lm), r.take(x_bar, T * ld);
    if (call.absorb < call.keys)
      r.take(states, call.keep / call.causal_chunk * (M * lv + 2 * wide_m));
    r.take(wq_bar, D * lm), r.take(wk_bar, D * lm), r.take(bq_bar, wide_m), r.take(bk_bar, wide_m);
  }

  // -- inputs

  bool ready(const Side& side) const {
    return side.feature == 1 && !side.bias && side.unit == 1 && M % W == 0;
  }

  static bool same(const Side& a, const Side& b) {
    return a.w == b.w && a.batch == b.batch && a.head == b.head && a.width == b.width &&
           a.feature == b.feature && a.bias == b.bias && a.bias_batch == b.bias_batch &&
           a.bias_head == b.bias_head && a.bias_feature == b.bias_feature && a.unit == b.unit;
  }

  const float* own(const Side& side) const { return side.w + b * side.batch + h * side.head; }

  // W (D x R) and b in units of the features' base; with `back` W transposed (R x D), as it is.
  void fill(const Side& side, float* w, float* bias, float* back) {
    const float* from = own(side);
    if (side.feature == 1) {
      for (int64_t d = 0; d < D; d++) {
        std::memcpy(w + d * lm, from + d * side.width, M * sizeof(float));
        clear(w + d * lm + M, wide_m - M);
      }
      if (back) transpose(D, wide_m, w, lm, back, ld);
    } else {
      float* rows = back ? back : pq;  // which is free until there are features
      for (int64_t m = 0; m < M; m++) {
        if (side.width == 1)
          std::memcpy(rows + m * ld, from + m * side.feature, D * sizeof(float));
        else
          for (int64_t d = 0; d < D; d++) rows[m * ld + d] = from[d * side.width + m * side.feature];
        clear(rows + m * ld + D, wide_d - D);
      }
      for (int64_t m = M; m < wide_m; m++) clear(rows + m * ld, wide_d);
      transpose(M, wide_d, rows, ld, w, lm);
    }
    const float unit = side.unit;
    if (unit != 1)
      for (int64_t d = 0; d < D; d++)
        for (int64_t m = 0; m < wide_m; m += W) store(w + d * lm + m, load(w + d * lm + m) * unit);
    clear(bias, wide_m);
    if (!side.bias) return;
    from = side.bias + b * side.bias_batch + h * side.bias_head;
    for (int64_t m = 0; m < M; m++) bias[m] = from[m * side.bias_feature] * unit;
  }

  Rows rows_of(const Tensor& tensor, int64_t head, int64_t i, int64_t t, int64_t width, int64_t ldx,
               float* to, bool own = false) const {
    int64_t at = b * tensor.batch + head * tensor.head + i * tensor.token;
    if (!own && tensor.type == FLOAT32 && tensor.last == 1 && width % W == 0)
      return {(const float*)tensor.data + at, tensor.token};
    for (int64_t r = 0; r < t; r++, at += tensor.token) {
      read_row(to + r * ldx, tensor.data, tensor.type, at, tensor.last, width);
      clear(to + r * ldx + width, padded(width) - width);
    }
    return {to, ldx};
  }

  // Where rows of a result are to be computed: in the tensor itself, or in a copy to be written.
  struct Target {
    float* data;
    int64_t pitch;
    bool copy;
    float* operator[](int64_t r) const { return data + r * pitch; }
  };

  Target target(const Tensor& tensor, int64_t head, int64_t i, int64_t width, float* scratch,
                int64_t ldx) const {
    const int64_t at = b * tensor.batch + head * tensor.head + i * tensor.token;
    if (tensor.type == FLOAT32 && tensor.last == 1 && width % W == 0)
      return {(float*)tensor.data + at, tensor.token, false};
    return {scratch, ldx, true};
  }

  void finish(const Tensor& tensor, int64_t head, int64_t i, int64_t t, int64_t width,
              const Target& from) const {
    if (!from.copy) return;
    int64_t at = b * tensor.batch + head * tensor.head + i * tensor.token;
    for (int64_t r = 0; r < t; r++, at += tensor.token)
      write_row(tensor.data, tensor.type, at, from[r], width);
  }

  // Asks for rows that will be read next.
  void soon(const Tensor& tensor, int64_t head, int64_t i, int64_t t, int64_t tokens,
            int64_t width) const {
    t = std::min(t, tokens - i);
    if (t <= 0 || tensor.last != 1 || tensor.token != width) return;
    const int64_t size = tensor.type == FLOAT32 ? 4 : 2;
    ahead.add((const char*)tensor.data +
                  (b * tensor.batch + head * tensor.head + i * tensor.token) * size,
              t * width * size);
  }

  // Keys into xk, values into y, log2-weights and closed flags.
  void keys(int64_t i, int64_t t) {
    bool any = false;
    for (int64_t r = 0; r < t; r++) {
      const bool shut = call.open && !call.open[b * call.keys + i + r];
      closed[r] = shut;
      any |= shut;
    }
    xk = rows_of(call.k, h, i, t, D, ld, xk_copy, any);
    y = rows_of(call.v, h, i, t, V, lv, y_copy, any);
    for (int64_t r = 0; r < t; r++) {
      const bool shut = closed[r] != 0;
      if (shut) clear(xk_copy + r * ld, wide_d), clear(y_copy + r * lv, wide_v);
      float w = 0;
      if (call.quad != 0) w -= call.quad * LOG2E * dot(xk[r], xk[r], wide_d);
      if (call.key_bias) w += LOG2E * call.key_bias[n * call.keys + i + r];
      weight[r] = shut ? -INFINITY : w;
    }
  }

  void queries(int64_t g, int64_t i, int64_t t) {
    x = rows_of(call.q, h * call.groups + g, i, t, D, ld, x_copy);
  }

  static float dot(const float* a, const float* b, int64_t wide) {
    Vec total{};
    for (int64_t j = 0; j < wide; j += W) total += load(a + j) * load(b + j);
    return sum(total);
  }

  // -- features

  Vec activated(Vec u) const {
    if (call.activation == RELU) return larger(u, Vec{}) + RELU_EPSILON;
    return choose(u > Vec{}, u + 1.0f, exp2(LOG2E * choose(u > Vec{}, Vec{}, u)));
  }

  void plain(float* p, int64_t t, const float* bias, bool shut) const {
    for (int64_t r = 0; r < t; r++) {
      for (int64_t m = 0; m < wide_m; m += W)
        store(p + r * lm + m, activated(load(p + r * lm + m) + load(bias + m)));
      clear(p + r * lm + M, wide_m - M);
      if (shut && closed[r] != 0) clear(p + r * lm, wide_m);
    }
  }

  // phi_k of a chunk into pk, the new running maximum into `level`.
  void key_features(int64_t t) {
    product<false, false>(t, wide_m, D, xk.data, xk.pitch, wk, lwk, pk, lm);
    if (!exponential()) {
      plain(pk, t, bk, true);
      std::memcpy(level, c, wide_m * sizeof(float));
      for (int64_t r = 0; r < t; r++) mass += closed[r] == 0;
      return;
    }
    for (int64_t m = 0; m < wide_m; m += W) {
      const Vec bias = load(bk + m);
      Vec most = load(c + m);
      for (int64_t r = 0; r < t; r++) {
        Vec u = load(pk + r * lm + m) + (bias + weight[r]);
        store(pk + r * lm + m, u);
        most = larger(u, most);
      }
      store(level + m, most);
      for (int64_t r = 0; r < t; r++)
        store(pk + r * lm + m, exp2(load(pk + r * lm + m) - most));
    }
    for (int64_t r = 0; r < t; r++) clear(pk + r * lm + M, wide_m - M);
  }

  // The same at the final level.
  void key_features_again(int64_t t) {
    product<false, false>(t, wide_m, D, xk.data, xk.pitch, wk, lwk, pk, lm);
    if (!exponential()) return plain(pk, t, bk, true);
    for (int64_t r = 0; r < t; r++) {
      for (int64_t m = 0; m < wide_m; m += W) {
        Vec u = load(pk + r * lm + m) + (load(bk + m) + weight[r]);
        store(pk + r * lm + m, exp2(u - load(c + m)));
      }
      clear(pk + r * lm + M, wide_m - M);
    }
  }

  // phi_q of a chunk into pq and the rows' log2 scales; `at` is the keys' level.
  void query_features(int64_t t, const float* at) {
    product<false, false>(t, wide_m, D, x.data, x.pitch, wq, lwq, pq, lm);
    if (!exponential()) {
      plain(pq, t, bq, false);
      for (int64_t r = 0; r < t; r++) scale[r] = 0;
      return;
    }
    for (int64_t r = 0; r < t; r++) {
      float* p = pq + r * lm;
      Vec most = all(NOWHERE);
      for (int64_t m = 0; m < wide_m; m += W) {
        Vec u = load(p + m) + (load(bq + m) + load(at + m));
        store(p + m, u);
        most = larger(u, most);
      }
      scale[r] = top(most);
      for (int64_t m = 0; m < wide_m; m += W) store(p + m, exp2(load(p + m) - scale[r]));
    }
  }

  // The same with the scales that the forward pass found.
  void query_features_at(int64_t g, int64_t i, int64_t t, const float* at) {
    product<false, false>(t, wide_m, D, x.data, x.pitch, wq, lwq, pq, lm);
    if (!exponential()) return plain(pq, t, bq, false);
    const float* found = call.scale + (n * call.groups + g) * call.queries + i;
    for (int64_t r = 0; r < t; r++) {
      float* p = pq + r * lm;
      for (int64_t m = 0; m < wide_m; m += W)
        store(p + m, exp2(load(p + m) + (load(bq + m) + load(at + m)) - found[r]));
    }
  }

  // -- the state again

  bool level_is_empty() const {
    if (!exponential()) return false;
    for (int64_t m = 0; m < M; m++)
      if (c[m] > 0.5f * EMPTY) return false;
    return true;
  }

  // A state at scale `from` comes to scale `level`.
  void rescale(const float* from, float* to_s, float* to_z) const {
    if (!exponential()) return;
    for (int64_t m = 0; m < wide_m; m += W) {
      const Vec decay = exp2(load(from + m) - load(level + m));
      store(to_z + m, load(to_z + m) * decay);
      for (int l = 0; l < W && m + l < M; l++) {
        const float d = decay[l];
        if (d == 1.0f) continue;
        for (int64_t j = 0; j < wide_v; j += W)
          store(to_s + (m + l) * lv + j, d * load(to_s + (m + l) * lv + j));
      }
    }
  }

  void swap_level() { std::memcpy(c, level, wide_m * sizeof(float)); }

  void enter(int64_t t) {
    for (int64_t m = 0; m < wide_m; m += W) {
      Vec total = load(z + m);
      for (int64_t r = 0; r < t; r++) total += load(pk + r * lm + m);
      store(z + m, total);
    }
    product<true, true>(M, wide_v, t, pk, lm, y.data, y.pitch, s, lv);
  }

  // -- results

  void answer(int64_t g, int64_t i, int64_t t) {
    const Target out = target(call.out, h * call.groups + g, i, V, num, lv);
    for (int64_t r = 0; r < t; r++) {
      const Vec factor = all(den[r] == 0 ? 1.0f : 1.0f / den[r]);
      for (int64_t j = 0; j < wide_v; j += W) stream(out[r] + j, load(num + r * lv + j) * factor);
    }
    finish(call.out, h * call.groups + g, i, t, V, out);
    const int64_t at = (n * call.groups + g) * call.queries + i;
    std::memcpy(call.den + at, den, t * sizeof(float));
    std::memcpy(call.scale + at, scale, t * sizeof(float));
  }

  // -- causal chunks: only what a row sees is computed, in blocks of ROWS rows

  // to (t x t) = tril(a bT) for a (t x wide) and bT (wide x t).
  void triangle(int64_t t, const float* a, int64_t lda, int64_t wide, const float* b_t,
                float* to) const {
    for (int64_t r = 0; r < t; r += BLOCK) {
      const int64_t rows = std::min<int64_t>(BLOCK, t - r), seen = padded(r + rows);
      product<false, false>(rows, seen, wide, a + r * lda, lda, b_t, lt, to + r * lt, lt);
      for (int64_t i = r; i < r + rows; i++) clear(to + i * lt + i + 1, lt - i - 1);
    }
  }

  // to (t x wide) += tril (t x t) times b (t x wide).
  void below(int64_t t, int64_t wide, const float* tril, const float* b, int64_t ldb, float* to,
             int64_t ldc) const {
    for (int64_t r = 0; r < t; r += BLOCK) {
      const int64_t rows = std::min<int64_t>(BLOCK, t - r);
      product<true, false>(rows, wide, r + rows, tril + r * lt, lt, b, ldb, to + r * ldc, ldc);
    }
  }

  // to (t x wide) += trilT (t x t) times b (t x wide).
  void above(int64_t t, int64_t wide, const float* tril, const float* b, int64_t ldb, float* to,
             int64_t ldc) const {
    for (int64_t r = 0; r < t; r += BLOCK) {
      const int64_t rows = std::min<int64_t>(BLOCK, t - r);
      product<true, true>(rows, wide, t - r, tril + r * lt + r, lt, b + r * ldb, ldb, to + r * ldc,
                          ldc);
    }
  }

  static constexpr int64_t BLOCK = 2 * ROWS;

  // -- backward

  // g = out_bar / den and delta = den_bar - sum(g * out).
  void outer(int64_t g, int64_t i, int64_t t) {
    const int64_t head = h * call.groups + g, at = (n * call.groups + g) * call.queries + i;
    const Rows bars = rows_of(call.out_bar, head, i, t, V, lv, gr);
    const Rows o = rows_of(call.out, head, i, t, V, lv, o_copy);
    for (int64_t r = 0; r < t; r++) {
      const float d = call.den[at + r];
      const Vec factor = all(d == 0 ? 0.0f : 1.0f / d);
      for (int64_t j = 0; j < wide_v; j += W)
        store(gr + r * lv + j, load(bars[r] + j) * factor);
      delta[r] = (call.den_bar ? call.den_bar[at + r] : 0.0f) - dot(gr + r * lv, o[r], wide_v);
    }
  }

  Vec slope(Vec phi) const {
    if (call.activation == RELU) return choose(phi <= all(RELU_EPSILON), Vec{}, all(1.0f));
    return choose(phi > all(1.0f), all(1.0f), phi);
  }

  void derive(float* p, const float* phi, int64_t t) const {
    if (exponential()) return;
    for (int64_t r = 0; r < t; r++)
      for (int64_t m = 0; m < wide_m; m += W)
        store(p + r * lm + m, load(p + r * lm + m) * slope(load(phi + r * lm + m)));
  }

  void collect(const Side& side, Rows from, const float* p, int64_t t, float* w_to,
               float* b_to) const {
    if (side.w_bar) product<true, true>(D, wide_m, t, from.data, from.pitch, p, lm, w_to, lm);
    if (side.bias_bar)
      for (int64_t m = 0; m < wide_m; m += W) {
        Vec total = load(b_to + m);
        for (int64_t r = 0; r < t; r++) total += load(p + r * lm + m);
        store(b_to + m, total);
      }
  }

  void give(const Side& side, const float* w_from, const float* b_from) const {
    if (side.w_bar)
      for (int64_t d = 0; d < D; d++)
        std::memcpy(side.w_bar + (n * D + d) * M, w_from + d * lm, M * sizeof(float));
    if (side.bias_bar) std::memcpy(side.bias_bar + n * M, b_from, M * sizeof(float));
  }

  void query_pullback(int64_t g, int64_t i, int64_t t) {
    derive(bar, pq, t);
    collect(call.query, x, bar, t, wq_bar, bq_bar);
    const int64_t head = h * call.groups + g;
    const Target to = target(call.q_bar, head, i, D, x_bar, ld);
    product<false, false>(t, wide_d, wide_m, bar, lm, wq_t, ld, to.data, to.pitch);
    finish(call.q_bar, head, i, t, D, to);
  }

  // From the cotangents key_bar of ln phi_k (or phi_k) and `values` of the values.
  void key_pullback(int64_t i, int64_t t, const Target& values) {
    if (!exponential())
      for (int64_t r = 0; r < t; r++)
        if (closed[r] != 0) clear(key_bar + r * lm, wide_m);
    derive(key_bar, pk, t);
    collect(call.key, xk, key_bar, t, wk_bar, bk_bar);
    const Target to = target(call.k_bar, h, i, D, x_bar, ld);
    product<false, false>(t, wide_d, wide_m, key_bar, lm, wk_t, ld, to.data, to.pitch);
    for (int64_t r = 0; r < t; r++) {
      float total = 0;
      if (call.quad != 0 || call.bias_bar) {
        Vec parts{};
        for (int64_t m = 0; m < wide_m; m += W) parts += load(key_bar + r * lm + m);
        total = closed[r] != 0 ? 0.0f : sum(parts);
      }
      if (call.quad != 0)
        for (int64_t d = 0; d < wide_d; d += W)
          store(to[r] + d, load(to[r] + d) - 2 * call.quad * total * load(xk[r] + d));
      if (call.bias_bar) call.bias_bar[n * call.keys + i + r] = total;
      if (closed[r] != 0) clear(to[r], D), clear(values[r], V);
    }
    finish(call.k_bar, h, i, t, D, to);
    finish(call.v_bar, h, i, t, V, values);
  }

  // One causal chunk, whose phi_k are there; s, z at scale c are the state before it, `after` is
  // the level behind it.
  void causal_chunk_backward(int64_t i, int64_t t) {
    keys(i, t);
    transpose(t, wide_m, pk, lm, pk_t, lt);
    transpose(t, wide_v, y.data, y.pitch, y_t, lt);
    transpose(M, wide_v, s_bar, lv, s_bar_t, lm);
    product<false, false>(t, wide_m, wide_v, y.data, y.pitch, s_bar_t, lm, key_bar, lm);
    for (int64_t r = 0; r < t; r++)
      for (int64_t m = 0; m < wide_m; m += W)
        store(key_bar + r * lm + m, load(key_bar + r * lm + m) + load(z_bar + m));
    const Target values = target(call.v_bar, h, i, V, num, lv);
    product<false, false>(t, wide_v, wide_m, pk, lm, s_bar, lv, values.data, values.pitch);
    std::memcpy(level, after, wide_m * sizeof(float));
    rescale(c, s, z);
    transpose(M, wide_v, s, lv, s_t, lm);
    const int64_t from = i + call.answered - call.absorb;
    for (int64_t g = 0; g < call.groups; g++) {
      queries(g, from, t);
      outer(g, from, t);
      query_features_at(g, from, t, after);
      triangle(t, pq, lm, wide_m, pk_t, inner);
      triangle(t, gr, lv, wide_v, y_t, pair);
      for (int64_t r = 0; r < t; r++)
        for (int64_t u = 0; u <= r; u++) pair[r * lt + u] += delta[r];
      product<false, false>(t, wide_m, wide_v, gr, lv, s_t, lm, bar, lm);
      below(t, wide_m, pair, pk, lm, bar, lm);
      for (int64_t r = 0; r < t; r++) {
        const float d = delta[r];
        for (int64_t m = 0; m < wide_m; m += W) {
          Vec u = load(bar + r * lm + m) + d * load(z + m), phi = load(pq + r * lm + m);
          store(bar + r * lm + m, exponential() ? u * phi : u);
          store(z_bar + m, load(z_bar + m) + d * phi);
        }
      }
      above(t, wide_m, pair, pq, lm, key_bar, lm);
      above(t, wide_v, inner, gr, lv, values.data, values.pitch);
      product<true, true>(M, wide_v, t, pq, lm, gr, lv, s_bar, lv);
      query_pullback(g, from, t);
    }
    if (exponential())
      for (int64_t r = 0; r < t; r++)
        for (int64_t m = 0; m < wide_m; m += W)
          store(key_bar + r * lm + m, load(key_bar + r * lm + m) * load(pk + r * lm + m));
    key_pullback(i, t, values);
    rescale(c, s_bar, z_bar);
  }
};

// ---- calls ----------------------------------------------------------------------------------

// Parts into which the tokens of each row are cut, so that few rows keep all threads busy.
int64_t segments(const Call& call, int64_t rows, int64_t tokens) {
  if (call.threads <= 1 || rows % call.threads == 0 || tokens < 4 * call.chunk) return 1;
  const int64_t wanted = (2 * call.threads + rows - 1) / rows;
  return std::max<int64_t>(1, std::min(wanted, tokens / (2 * call.chunk)));
}

// Where a part begins, at a multiple of `unit` tokens.
int64_t cut(int64_t tokens, int64_t part, int64_t parts, int64_t unit = 1) {
  return part == parts ? tokens : tokens * part / parts / unit * unit;
}

// States of parts of the keys, which add up to the state behind them.
class Parts {
 public:
  Parts(const Call& call, int64_t count)
      : call(call),
        lv(pitch(call.value)),
        M(call.features),
        own(M * lv + 2 * M + 1),
        held(count * own) {}

  void keep(int64_t at, const Row& row) {
    float* to = held.data() + at * own;
    std::memcpy(to, row.state_s(), M * lv * sizeof(float));
    std::memcpy(to + M * lv, row.state_z(), M * sizeof(float));
    std::memcpy(to + M * lv + M, row.state_c(), M * sizeof(float));
    to[own - 1] = row.state_mass();
  }

  void add(Row& row, int64_t from, int64_t to) const {
    for (; from < to; from++) {
      const float* p = held.data() + from * own;
      row.merge(p, p + M * lv, p + M * lv + M, p[own - 1]);
    }
  }

 private:
  const Call& call;
  const int64_t lv, M, own;
  std::vector<float> held;
};

}  // namespace

#define API __attribute__((visibility("default")))

extern "C" {

API int subquad_version() { return 1; }

API int subquad_call_size() { return (int)sizeof(Call); }

// 0, or 1 where a causal row underflowed: the results are then not to be used.
API int subquad_forward(const Call* given) {
  const Call& call = *given;
  const int64_t rows = call.batch * call.kv;
  std::atomic<int> bad{0};
  const bool whole_vectors = call.value % W == 0;
  if (call.keys == 1 && call.queries == 1 && !call.absorb && !call.keep && whole_vectors) {
    divide(rows, call.threads, [&](int64_t n) {
      if (!Row(call, n, false).one()) bad = 1;
    });
    return bad;
  }
  if (call.keys == 0 && !call.s) {  // a state is read and stays
    divide(rows, call.threads, [&](int64_t n) {
      Row row(call, n, false);
      if (whole_vectors && call.queries <= call.causal_chunk) return row.look();
      row.begin();
      row.read(0, call.queries);
    });
    return bad;
  }
  const int64_t parts = segments(call, rows, call.keys);
  if (parts == 1) {
    divide(rows, call.threads, [&](int64_t n) {
      Row row(call, n, false);
      row.begin();
      row.absorb(0, call.absorb);
      row.read(0, call.answered);
      if (!row.causal(call.absorb, call.keys)) bad = 1;
      row.end();
    });
    return bad;
  }
  // Few rows: parts of the keys enter states of their own. Queries of phase 2 read their sum; a
  // part of phase 3 begins with the sum of those before it, for which its keys enter twice.
  Parts first(call, rows * parts);
  divide(rows * parts, call.threads, [&](int64_t unit) {
    Row row(call, unit / parts, false);
    const int64_t part = unit % parts;
    if (part == 0)
      row.begin();
    else
      row.empty();
    row.absorb(cut(call.absorb, part, parts), cut(call.absorb, part + 1, parts));
    first.keep(unit, row);
  });
  divide(rows * parts, call.threads, [&](int64_t unit) {
    Row row(call, unit / parts, false);
    row.empty();
    first.add(row, unit / parts * parts, (unit / parts + 1) * parts);
    row.read(cut(call.answered, unit % parts, parts), cut(call.answered, unit % parts + 1, parts));
  });
  const int64_t walk = call.keys - call.absorb, times = std::min(parts, segments(call, rows, walk));
  const int64_t whole = std::max(call.keep, 4 * call.causal_chunk);
  Parts then(call, rows * times);
  divide(times > 1 ? rows * times : 0, call.threads, [&](int64_t unit) {
    Row row(call, unit / times, false);
    const int64_t part = unit % times;
    row.empty();
    if (part + 1 < times)
      row.absorb(call.absorb + cut(walk, part, times, whole),
                 call.absorb + cut(walk, part + 1, times, whole));
    then.keep(unit, row);
  });
  divide(rows * times, call.threads, [&](int64_t unit) {
    const int64_t n = unit / times, part = unit % times;
    Row row(call, n, false);
    row.empty();
    first.add(row, n * parts, (n + 1) * parts);
    then.add(row, n * times, unit);
    if (!row.causal(call.absorb + cut(walk, part, times, whole),
                    call.absorb + cut(walk, part + 1, times, whole)))
      bad = 1;
    if (part + 1 == times) row.end();
  });
  return bad;
}

API int subquad_backward(const Call* given) {
  const Call& call = *given;
  divide(call.batch * call.kv, call.threads, [&](int64_t n) {
    Row row(call, n, true);
    row.begin_backward();
    if (call.absorb < call.keys) row.causal_backward();
    row.first_state();
    row.read_backward(0, call.answered);
    row.absorb_backward(0, call.absorb);
    row.end_backward();
  });
  return 0;
}

}  // extern "C"
