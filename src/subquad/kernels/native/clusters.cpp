// What queries read of clusters of keys, forward: the algorithm of `subquad/attention/summary/
// refined.py`. Queries are the lanes of all matrices: maxima, exponentials, the choice of clusters
// and the estimates of near keys then run along rows, and tables are read as they lie.
//
// Logits are in base 2. A unit of work is a few hundred queries of one key-value head.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int LANES = 64;             // queries at a time
constexpr int MOST = 8;               // clusters of a query whose members are read
constexpr float ABSENT = -1e30f;      // the least logit, as in Python
constexpr float SPREAD = 4.0f;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

}  // namespace

extern "C" {

// (B, heads, n, width) with element (b, h, i, d) at data[b*batch + h*head + i*token + d].
struct Strided {
  const float* data;
  int64_t batch, head, token;
};

struct ReadCall {
  Strided q, k, v;                             // k, v: null without a window
  const float *keys, *values, *spread, *whiten;  // (N, C, D+1), (N, C, V+1), (N, M, D), (N, D+1, D)
  const float *members, *member_values;        // (N, M, e, D+2), (N, M, e, V+1), or null
  const int64_t* place;                        // (N, M, e), or null
  const uint8_t* open;                         // (N, S)
  const float* weight;                         // (N, S)
  const int64_t *cluster, *widths;             // (N, S), (B)
  float *num, *den, *scale;                    // (B, H, L, V), (B, H, L) twice
  int64_t batch, kv, groups, queries, tokens, width, value, columns, clusters, each, refine, first;
  float factor;                                // of the logits
  int32_t exact, threads;
};

}  // extern "C"

namespace {

class Reader {
 public:
  Reader(const ReadCall& call, int64_t n)
      : call(call),
        n(n),
        b(n / call.kv),
        h(n % call.kv),
        D(call.width),
        V(call.value),
        C(call.columns),
        M(call.clusters),
        lx(pitch(D + 1)),
        lv(pitch(V)),
        lanes(pitch(LANES)),
        wide_v(padded(V)),
        span(call.k.data ? LANES + 2 * call.widths[b] : 0),
        room([&](Room& r) { lay(r); }),
        found(call.refine * call.each) {
    for (int64_t c = 0; c < C; c++) {
      const float* from = call.values + (n * C + c) * (V + 1);
      std::memcpy(values + c * lv, from, V * sizeof(float));
      clear(values + c * lv + V, lv - V);
      totals[c] = from[V];
    }
    // The squares of x W are to be those of natural logits, halved.
    const float* w = call.whiten + n * (D + 1) * D;
    for (int64_t i = 0; i < (D + 1) * D; i++) whiten[i] = w[i] * (float)(M_SQRT1_2 / LOG2E);
  }

  // Queries i..i+t of the g-th head, t at most LANES.
  void read(int64_t g, int64_t i, int64_t t) {
    wide = padded(t);
    queries(g, i, t);
    product<false, false>(C, wide, D + 1, call.keys + n * C * (D + 1), D + 1, x_t, lanes, phi, lanes);
    each([&](int64_t l) {
      Vec most = load(phi + l);
      for (int64_t c = 1; c < C; c++) most = larger(load(phi + c * lanes + l), most);
      store(top + l, most);
    });
    near_scores(i, t);
    each([&](int64_t l) {
      const Vec most = larger(load(top + l), all(0.1f * ABSENT * LOG2E));
      store(top + l, most);
      for (int64_t c = 0; c < C; c++) store(phi + c * lanes + l, exp2(load(phi + c * lanes + l) - most));
    });
    widen();
    each([&](int64_t l) {
      Vec total{};
      for (int64_t c = 0; c < C; c++) total += load(phi + c * lanes + l) * totals[c];
      store(den + l, total);
    });
    product<false, true>(t, wide_v, C, phi, lanes, values, lv, out, lv);
    near_sums(t);
    if (call.members) members(i, t);
    const int64_t at = ((b * call.kv + h) * call.groups + g) * call.queries + i;
    for (int64_t r = 0; r < t; r++) {
      std::memcpy(call.num + (at + r) * V, out + r * lv, V * sizeof(float));
      call.den[at + r] = den[r];
      call.scale[at + r] = top[r] * LN2;
    }
  }

 private:
  const ReadCall& call;
  const int64_t n, b, h, D, V, C, M, lx, lv, lanes, wide_v, span;
  Room room;
  int64_t wide = 0, near = 0, from = 0;  // lanes in use; keys of the window, and the first
  int64_t reach = 0, start = 0;          // keys on each side of a query, and the first query
  struct Member {
    float score, estimate;
    const float* value;
  };
  std::vector<Member> found;
  float *values, *totals, *whiten, *x, *x_t, *phi, *white, *more, *top, *den, *out, *scores, *copy;

  void lay(Room& r) {
    r.take(values, C * lv), r.take(totals, C), r.take(whiten, (D + 1) * D);
    r.take(x, LANES * lx), r.take(x_t, (D + 1) * lanes), r.take(phi, C * lanes);
    r.take(white, D * lanes), r.take(more, M * lanes), r.take(top, LANES), r.take(den, LANES);
    r.take(out, LANES * lv), r.take(scores, span * lanes), r.take(copy, V % W ? span * lv : 0);
  }

  template <class Lane>
  void each(const Lane& lane) const {
    for (int64_t l = 0; l < wide; l += W) lane(l);
  }

  static void clear(float* p, int64_t count) { std::memset(p, 0, count * sizeof(float)); }

  // x = [q | 1] in base 2, and its transpose.
  void queries(int64_t g, int64_t i, int64_t t) {
    const float* q = call.q.data + b * call.q.batch + (h * call.groups + g) * call.q.head;
    const float factor = call.factor * LOG2E;
    for (int64_t r = 0; r < t; r++) {
      const float* row = q + (i + r) * call.q.token;
      float* to = x + r * lx;
      for (int64_t d = 0; d < D; d++) to[d] = row[d] * factor;
      to[D] = LOG2E;
      clear(to + D + 1, lx - D - 1);
    }
    transpose(t, D + 1, x, lx, x_t, lanes);
  }

  // phi of the clusters times 1 + h.
  void widen() {
    product<false, true>(D, wide, D + 1, whiten, D, x_t, lanes, white, lanes);
    for (int64_t d = 0; d < D; d++)
      each([&](int64_t l) {
        const Vec y = load(white + d * lanes + l);
        store(white + d * lanes + l, y * y);
      });
    product<false, false>(M, wide, D, call.spread + n * M * D, D, white, lanes, more, lanes);
    for (int64_t m = 0; m < M; m++)
      each([&](int64_t l) {
        const Vec grown = load(more + m * lanes + l);
        const Vec factor = choose(grown > all(SPREAD), all(SPREAD), grown) + 1.0f;
        store(phi + m * lanes + l, load(phi + m * lanes + l) * factor);
      });
  }

  // ---- the window ----

  const float* token(const Strided& t, int64_t j) const {
    return t.data + b * t.batch + h * t.head + j * t.token;
  }

  // Lanes (all 1s) whose query has the j-th of the near keys in its window.
  Ints reached(int64_t j, int64_t l) const {
    const int32_t low = (int32_t)(from + j - reach - call.first - start);
    const int32_t high = (int32_t)(from + j + reach - call.first - start);
    Ints lane;
    for (int u = 0; u < W; u++) lane[u] = (int32_t)l + u;
    return (lane >= low) & (lane <= high);
  }

  void near_scores(int64_t i, int64_t t) {
    near = 0;
    if (!call.k.data) return;
    reach = call.widths[b], start = i;
    from = std::max<int64_t>(0, call.first + i - reach);
    near = std::max<int64_t>(0, std::min(call.tokens, call.first + i + t + reach) - from);
    if (!near || !call.exact) return;
    product<false, false>(near, wide, D, token(call.k, from), call.k.token, x_t, lanes, scores, lanes);
    const uint8_t* open = call.open + n * call.tokens + from;
    for (int64_t j = 0; j < near; j++)
      each([&](int64_t l) {
        float* at = scores + j * lanes + l;
        const Ints seen = open[j] ? reached(j, l) : Ints{};
        const Vec score = choose(seen, load(at), all(ABSENT * LOG2E));
        store(at, score);
        store(top + l, larger(score, load(top + l)));
      });
  }

  // The exact weights of near keys in the place of their estimates.
  void near_sums(int64_t t) {
    if (!near) return;
    const float* weight = call.weight + n * call.tokens + from;
    const int64_t* cluster = call.cluster + n * call.tokens + from;
    for (int64_t j = 0; j < near; j++)
      each([&](int64_t l) {
        float* at = scores + j * lanes + l;
        const Vec exact = call.exact ? exp2(load(at) - load(top + l)) : Vec{};
        const Vec estimate = load(phi + cluster[j] * lanes + l) * weight[j];
        const Vec change = choose(reached(j, l), exact - estimate, Vec{});
        store(at, change);
        store(den + l, load(den + l) + change);
      });
    const float* v = token(call.v, from);
    int64_t step = call.v.token;
    if (V % W) {
      for (int64_t j = 0; j < near; j++) {
        std::memcpy(copy + j * lv, v + j * step, V * sizeof(float));
        clear(copy + j * lv + V, lv - V);
      }
      v = copy, step = lv;
    }
    product<true, true>(t, wide_v, near, scores, lanes, v, step, out, lv);
  }

  // ---- members of clusters ----

  // The clusters with the largest phi: the last bits of the numbers hold the index.
  void choose_clusters(int32_t (*chosen)[LANES], int64_t count) const {
    int32_t last = 0;
    while (last < M - 1) last = 2 * last + 1;
    each([&](int64_t l) {
      Ints best[MOST];
      for (int64_t s = 0; s < count; s++) best[s] = Ints{} - 1;
      for (int64_t m = 0; m < M; m++) {
        const Vec weight = load(phi + m * lanes + l);
        Ints code;
        std::memcpy(&code, &weight, sizeof code);
        code = (code & ~last) | (int32_t)m;
        for (int64_t s = 0; s < count; s++) {
          const Ints above = code > best[s], more = above ? code : best[s];
          code = above ? best[s] : code;
          best[s] = more;
        }
      }
      for (int64_t s = 0; s < count; s++) {
        const Ints found = best[s] & last;
        std::memcpy(chosen[s] + l, &found, sizeof found);
      }
    });
  }

  // The exact weights of the members of each query's clusters in the place of their estimates.
  void members(int64_t i, int64_t t) {
    int32_t chosen[MOST][LANES];
    choose_clusters(chosen, call.refine);
    for (int64_t r = 0; r < t; r++) {
      const float* query = x + r * lx;
      const int64_t at = call.first + i + r;
      float most = top[r];
      int64_t count = 0;
      for (int64_t s = 0; s < call.refine; s++) {
        const int64_t m = std::min<int64_t>(chosen[s][r], M - 1);
        for (int64_t u = 0; u < call.each; u++) {
          const int64_t row = (n * M + m) * call.each + u;
          if (call.k.data && std::abs(call.place[row] - at) <= call.widths[b]) continue;
          const float* key = call.members + row * (D + 2);
          const float score = dot(query, key, D + 1);
          if (!(score > 0.5f * ABSENT)) continue;
          found[count++] = {score, phi[m * lanes + r] * key[D + 1], call.member_values + row * (V + 1)};
          most = std::max(most, score);
        }
      }
      const float lift = std::exp2(top[r] - most);
      float *to = out + r * lv, total = den[r] * lift;
      for (int64_t j = 0; j < wide_v; j += W) store(to + j, load(to + j) * lift);
      for (int64_t s = 0; s < count; s++) {
        const float change = std::exp2(found[s].score - most) - found[s].estimate * lift;
        add(to, found[s].value, change);
        total += change * found[s].value[V];
      }
      den[r] = total, top[r] = most;
    }
  }

  static float dot(const float* x, const float* y, int64_t count) {
    Vec total{};
    int64_t j = 0;
    for (; j + W <= count; j += W) total += load(x + j) * load(y + j);
    float rest = sum(total);
    for (; j < count; j++) rest += x[j] * y[j];
    return rest;
  }

  void add(float* to, const float* value, float factor) const {
    int64_t j = 0;
    for (; j + W <= V; j += W) store(to + j, load(to + j) + load(value + j) * factor);
    for (; j < V; j++) to[j] += value[j] * factor;
  }
};

}  // namespace

#define API __attribute__((visibility("default")))

extern "C" {

API int subquad_read_call_size() { return (int)sizeof(ReadCall); }

API void subquad_read_clusters(const ReadCall* given) {
  const ReadCall& call = *given;
  const int64_t rows = call.batch * call.kv, blocks = (call.queries + LANES - 1) / LANES;
  // Tables are laid out anew for each part: not too many.
  const int64_t wanted = call.threads > 1 ? (4 * call.threads + rows - 1) / rows : 1;
  const int64_t parts = std::max<int64_t>(1, std::min(wanted, blocks / 4));
  divide(rows * parts, call.threads, [&](int64_t unit) {
    Reader reader(call, unit / parts);
    const int64_t part = unit % parts;
    for (int64_t g = 0; g < call.groups; g++)
      for (int64_t i = blocks * part / parts; i < blocks * (part + 1) / parts; i++)
        reader.read(g, i * LANES, std::min<int64_t>(LANES, call.queries - i * LANES));
  });
}

}  // extern "C"
