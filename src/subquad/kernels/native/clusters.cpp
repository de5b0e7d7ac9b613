// What queries read of clusters of keys, forward: the algorithm of `subquad/attention/summary/
// refined.py`. Queries are the lanes of all matrices: maxima, exponentials, the choice of clusters
// and the estimates of near keys then run along rows, and tables are read as they lie.
//
// Logits are in base 2. A unit of work is a few hundred queries of one key-value head.
//
// And what k-means needs: nearest centres, and sums by cluster.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "threads.h"
#include "vectors.h"

namespace {

constexpr int LANES = 64;             // queries at a time; a part of them is filled up
constexpr int VECS = LANES / W;
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

// Rows x (B, heads, S, D) with centres (N, C, D), half their squares (N, C), and which is nearest.
struct NearestCall {
  Strided x;
  const float *centres, *half;
  int64_t* found;  // (N, S)
  int64_t batch, heads, tokens, width, count;
  int32_t threads, unused;
};

// Sums (N, C, D) of rows x (B, heads, S, D), times their weights, in each cluster.
struct SumsCall {
  Strided x;
  const float* weight;     // (N, S), or null
  const int64_t* cluster;  // (N, S)
  float* sums;
  int64_t batch, heads, tokens, width, count;
  int32_t threads, unused;
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
    for (int u = 0; u < W; u++) index[u] = u;
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
    queries(g, i, t);
    product<false, false>(C, LANES, D + 1, call.keys + n * C * (D + 1), D + 1, x_t, lanes, phi, lanes);
    Lanes most = level(0.1f * ABSENT * LOG2E);
    for (int64_t c = 0; c < C; c++)
      for (int u = 0; u < VECS; u++) most.v[u] = larger(load(phi + c * lanes + u * W), most.v[u]);
    near_scores(i, t, most);
    put(top, most);
    for (int64_t c = 0; c < C; c++)
      for (int u = 0; u < VECS; u++) {
        float* at = phi + c * lanes + u * W;
        store(at, exp2(load(at) - most.v[u]));
      }
    widen();
    Lanes total = level(0.0f);
    for (int64_t c = 0; c < C; c++)
      for (int u = 0; u < VECS; u++) total.v[u] += load(phi + c * lanes + u * W) * totals[c];
    product<false, true>(t, wide_v, C, phi, lanes, values, lv, out, lv);
    near_sums(t, most, total);
    put(den, total);
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
  int64_t near = 0, from = 0;    // keys of the window, and the first of them
  int64_t reach = 0, start = 0;  // keys on each side of a query, and the first query
  Ints index;
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

  // A number of each query.
  struct Lanes {
    Vec v[VECS];
  };

  static Lanes level(float x) {
    Lanes found;
    for (Vec& v : found.v) v = all(x);
    return found;
  }

  static void put(float* to, const Lanes& from) {
    for (int u = 0; u < VECS; u++) store(to + u * W, from.v[u]);
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
    clear(x + t * lx, (LANES - t) * lx);
    transpose(LANES, D + 1, x, lx, x_t, lanes);
  }

  // phi of the clusters times 1 + h.
  void widen() {
    product<false, true>(D, LANES, D + 1, whiten, D, x_t, lanes, white, lanes);
    for (int64_t d = 0; d < D; d++)
      for (int u = 0; u < VECS; u++) {
        const Vec y = load(white + d * lanes + u * W);
        store(white + d * lanes + u * W, y * y);
      }
    product<false, false>(M, LANES, D, call.spread + n * M * D, D, white, lanes, more, lanes);
    for (int64_t m = 0; m < M; m++)
      for (int u = 0; u < VECS; u++) {
        const Vec grown = load(more + m * lanes + u * W);
        const Vec factor = choose(grown > all(SPREAD), all(SPREAD), grown) + 1.0f;
        float* at = phi + m * lanes + u * W;
        store(at, load(at) * factor);
      }
  }

  // ---- the window ----

  const float* token(const Strided& t, int64_t j) const {
    return t.data + b * t.batch + h * t.head + j * t.token;
  }

  // Lanes (all 1s) whose query has the j-th of the near keys in its window.
  Ints reached(int64_t j, int u) const {
    const int32_t low = (int32_t)(from + j - reach - call.first - start);
    const int32_t high = (int32_t)(from + j + reach - call.first - start);
    const Ints lane = index + u * W;
    return (lane >= low) & (lane <= high);
  }

  void near_scores(int64_t i, int64_t t, Lanes& most) {
    near = 0;
    if (!call.k.data) return;
    reach = call.widths[b], start = i;
    from = std::max<int64_t>(0, call.first + i - reach);
    near = std::max<int64_t>(0, std::min(call.tokens, call.first + i + t + reach) - from);
    if (!near || !call.exact) return;
    product<false, false>(near, LANES, D, token(call.k, from), call.k.token, x_t, lanes, scores, lanes);
    const uint8_t* open = call.open + n * call.tokens + from;
    for (int64_t j = 0; j < near; j++)
      for (int u = 0; u < VECS; u++) {
        float* at = scores + j * lanes + u * W;
        const Ints seen = open[j] ? reached(j, u) : Ints{};
        const Vec score = choose(seen, load(at), all(ABSENT * LOG2E));
        store(at, score);
        most.v[u] = larger(score, most.v[u]);
      }
  }

  // The exact weights of near keys in the place of their estimates.
  void near_sums(int64_t t, const Lanes& most, Lanes& total) {
    if (!near) return;
    const float* weight = call.weight + n * call.tokens + from;
    const int64_t* cluster = call.cluster + n * call.tokens + from;
    for (int64_t j = 0; j < near; j++)
      for (int u = 0; u < VECS; u++) {
        float* at = scores + j * lanes + u * W;
        const Vec exact = call.exact ? exp2(load(at) - most.v[u]) : Vec{};
        const Vec estimate = load(phi + cluster[j] * lanes + u * W) * weight[j];
        const Vec change = choose(reached(j, u), exact - estimate, Vec{});
        store(at, change);
        total.v[u] += change;
      }
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
    for (int64_t l = 0; l < LANES; l += W) {
      Ints best[MOST];
      for (int64_t s = 0; s < count; s++) best[s] = Ints{} - 1;
      for (int64_t m = 0; m < M; m++) {
        const Vec weight = load(phi + m * lanes + l);
        Ints code;
        std::memcpy(&code, &weight, sizeof code);
        code = (code & ~last) | (int32_t)m;
        for (int64_t s = 0; s < count; s++) {
          const Ints above = code > best[s], larger = above ? code : best[s];
          code = above ? best[s] : code;
          best[s] = larger;
        }
      }
      for (int64_t s = 0; s < count; s++) {
        const Ints found = best[s] & last;
        std::memcpy(chosen[s] + l, &found, sizeof found);
      }
    }
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

// The first centre with the least |c|^2 / 2 - x c, for LANES rows at a time.
class Nearest {
 public:
  Nearest(const NearestCall& call, int64_t n)
      : call(call), n(n), room([&](Room& r) {
          const int64_t d = call.width;
          r.take(x, LANES * pitch(d)), r.take(x_t, d * pitch(LANES)), r.take(dots, call.count * pitch(LANES));
        }) {}

  void find(int64_t i, int64_t t) {
    const int64_t D = call.width, ld = pitch(D), lanes = pitch(LANES), wide = padded(t);
    const float* rows = call.x.data + n / call.heads * call.x.batch + n % call.heads * call.x.head;
    for (int64_t r = 0; r < t; r++) {
      std::memcpy(x + r * ld, rows + (i + r) * call.x.token, D * sizeof(float));
      std::memset(x + r * ld + D, 0, (ld - D) * sizeof(float));
    }
    transpose(t, D, x, ld, x_t, lanes);
    product<false, false>(call.count, wide, D, call.centres + n * call.count * D, D, x_t, lanes, dots, lanes);
    const float* half = call.half + n * call.count;
    for (int64_t l = 0; l < wide; l += W) {
      Vec least = all(INFINITY);
      Ints at{};
      for (int64_t c = 0; c < call.count; c++) {
        const Vec score = half[c] - load(dots + c * lanes + l);
        const Ints nearer = score < least;
        least = choose(nearer, score, least);
        at = nearer ? Ints{} + (int32_t)c : at;
      }
      for (int64_t u = 0; u < W && l + u < t; u++) call.found[n * call.tokens + i + l + u] = at[u];
    }
  }

 private:
  const NearestCall& call;
  const int64_t n;
  float *x, *x_t, *dots;
  Room room;
};

}  // namespace

#define API __attribute__((visibility("default")))

extern "C" {

API int subquad_read_call_size() { return (int)sizeof(ReadCall); }

API int subquad_nearest_call_size() { return (int)sizeof(NearestCall); }

API int subquad_sums_call_size() { return (int)sizeof(SumsCall); }

API void subquad_nearest(const NearestCall* given) {
  const NearestCall& call = *given;
  const int64_t blocks = (call.tokens + LANES - 1) / LANES;
  divide(call.batch * call.heads, call.threads, [&](int64_t n) {
    Nearest nearest(call, n);
    for (int64_t i = 0; i < blocks; i++)
      nearest.find(i * LANES, std::min<int64_t>(LANES, call.tokens - i * LANES));
  });
}

API void subquad_sums(const SumsCall* given) {
  const SumsCall& call = *given;
  const int64_t D = call.width;
  divide(call.batch * call.heads, call.threads, [&](int64_t n) {
    const float* rows = call.x.data + n / call.heads * call.x.batch + n % call.heads * call.x.head;
    float* sums = call.sums + n * call.count * D;
    std::memset(sums, 0, call.count * D * sizeof(float));
    for (int64_t i = 0; i < call.tokens; i++) {
      const float* x = rows + i * call.x.token;
      const float weight = call.weight ? call.weight[n * call.tokens + i] : 1.0f;
      float* to = sums + call.cluster[n * call.tokens + i] * D;
      int64_t d = 0;
      for (; d + W <= D; d += W) store(to + d, load(to + d) + load(x + d) * weight);
      for (; d < D; d++) to[d] += x[d] * weight;
    }
  });
}

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
