// What queries read of clusters of keys, forward and backward: the algorithm of `subquad/attention/
// summary/refined.py`. Queries are the lanes of all matrices: maxima, exponentials, the choice of clusters
// and the estimates of near keys then run along rows, and tables are read as they lie.
//
// Logits are in base 2. A unit of work is a few hundred queries of one key-value head.
//
// And what k-means needs: nearest centres, and sums by cluster.

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "rows.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int LANES = 64;             // queries at a time; a part of them is filled up
constexpr int VECS = LANES / W;
constexpr int MOST = 8;               // clusters of a query whose members are read
constexpr float ABSENT = -1e30f;      // the least logit, as in Python
constexpr int64_t WIDEST = 16;
constexpr float SPREAD = 4.0f;

}  // namespace

extern "C" {

struct ReadCall {
  Strided q, k, v;                             // k, v: null without a window
  const float *keys, *values, *spread, *whiten;  // (N, C, D+1), (N, C, V+1), (N, M, D), (N, D+1, D)
  const float *members, *member_values;        // (N, M, e, D+2), (N, M, e, V+1), or null
  const int64_t* place;                        // (N, M, e), or null
  const uint8_t* open;                         // (N, S)
  const float* weight;                         // (N, S)
  const int64_t *cluster, *widths;             // (N, S), (B)
  float *num, *den, *scale;                    // (B, H, L, V), (B, H, L) twice
  // Backward: gradients of the sums; zeros to be added to, rows of k_bar and v_bar padded to WIDEST.
  const float *num_bar, *den_bar;
  float *q_bar, *k_bar, *v_bar, *weight_bar;   // (B, H, L, D), (N, S, D), (N, S, V), (N, S)
  float *keys_bar, *values_bar, *spread_bar, *members_bar, *member_values_bar;  // as the tables
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
  Reader(const ReadCall& call, int64_t n, bool training)
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
        ld(pitch(D)),
        lanes(pitch(LANES)),
        wide_v(padded(V)),
        span(call.k.data ? LANES + 2 * call.widths[b] : 0),
        training(training),
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
    if (!training) return;
    clear(keys_bar, C * lx), clear(values_bar, C * lv), clear(totals_bar, C), clear(spread_bar, M * ld);
  }

  // Queries i..i+t of the g-th head, t at most LANES.
  void read(int64_t g, int64_t i, int64_t t) {
    Lanes total = weigh(g, i, t);
    product<false, true>(t, wide_v, C, phi, lanes, values, lv, out, lv);
    if (near) {
      const Values v = near_values();
      product<true, true>(t, wide_v, near, scores, lanes, v.data, v.step, out, lv);
    }
    put(den, total);
    if (call.members) members(i, t);
    const int64_t at = row(g, i);
    for (int64_t r = 0; r < t; r++) {
      std::memcpy(call.num + (at + r) * V, out + r * lv, V * sizeof(float));
      call.den[at + r] = den[r];
      call.scale[at + r] = top[r] * LN2;
    }
  }

  // The gradients of those queries' sums. Matrices of queries are transposed here, too.
  void pull_back(int64_t g, int64_t i, int64_t t) {
    weigh(g, i, t);
    const int64_t at = row(g, i);
    for (int64_t r = 0; r < t; r++) {
      std::memcpy(bar + r * lv, call.num_bar + (at + r) * V, V * sizeof(float));
      clear(bar + r * lv + V, lv - V);
      for (int64_t d = 0; d <= D; d++) x[r * lx + d] *= LN2;  // [q | 1] by natural logits
    }
    clear(bar + t * lv, (LANES - t) * lv), clear(row_bar, LANES * lx);
    for (int64_t r = 0; r < LANES; r++) den_bar[r] = r < t ? call.den_bar[at + r] : 0;
    tilts.clear();
    if (call.members) pull_back_members(i, t);
    transpose(LANES, wide_v, bar, lv, bar_t, lanes);
    product<true, false>(C, wide_v, LANES, phi, lanes, bar, lv, values_bar, lv);
    product<false, false>(C, LANES, V, values, lv, bar_t, lanes, bars, lanes);
    for (int64_t c = 0; c < C; c++) {
      Vec sums{};
      for (int64_t l = 0; l < LANES; l += W) {
        float* b = bars + c * lanes + l;
        sums += load(phi + c * lanes + l) * load(den_bar + l);
        store(b, load(b) + load(den_bar + l) * totals[c]);
      }
      totals_bar[c] += sum(sums);
    }
    clear(x_bar, D * lanes);
    if (near) pull_back_near();
    for (const Tilt& one : tilts) bars[one.cluster * lanes + one.query] -= one.by;
    for (int64_t c = 0; c < C; c++)  // of the logits
      for (int64_t l = 0; l < LANES; l += W) {
        float* b = bars + c * lanes + l;
        store(b, load(b) * load(phi + c * lanes + l));
      }
    product<true, true>(D, LANES, C, call.keys + n * C * (D + 1), D + 1, bars, lanes, x_bar, lanes);
    product<true, false>(C, padded(D + 1), LANES, bars, lanes, x, lx, keys_bar, lx);
    pull_back_spread();
    transpose(D, LANES, x_bar, lanes, white_rows, ld);
    float* q_bar = call.q_bar + at * D;
    for (int64_t r = 0; r < t; r++)
      for (int64_t d = 0; d < D; d++)
        q_bar[r * D + d] = call.factor * (white_rows[r * ld + d] + row_bar[r * lx + d]);
  }

  // Adds up what belongs to this head alone.
  void end() {
    for (int64_t c = 0; c < C; c++) {
      std::memcpy(call.keys_bar + (n * C + c) * (D + 1), keys_bar + c * lx, (D + 1) * sizeof(float));
      std::memcpy(call.values_bar + (n * C + c) * (V + 1), values_bar + c * lv, V * sizeof(float));
      call.values_bar[(n * C + c) * (V + 1) + V] = totals_bar[c];
    }
    for (int64_t m = 0; m < M; m++)
      std::memcpy(call.spread_bar + (n * M + m) * D, spread_bar + m * ld, D * sizeof(float));
  }

 private:
  // The weights of queries i..i+t: phi of the clusters, `scores` what the window changes. The
  // normalisers, without members.
  struct Lanes;
  Lanes weigh(int64_t g, int64_t i, int64_t t) {
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
    near_changes(most, total);
    return total;
  }

  const ReadCall& call;
  const int64_t n, b, h, D, V, C, M, lx, lv, ld, lanes, wide_v, span;
  const bool training;
  Room room;
  int64_t near = 0, from = 0;    // keys of the window, and the first of them
  int64_t reach = 0, start = 0;  // keys on each side of a query, and the first query
  Ints index;
  struct Member {
    float score, estimate;
    const float* value;
    int64_t row, cluster;
  };
  std::vector<Member> found;
  struct Tilt {
    int64_t cluster, query;
    float by;
  };
  std::vector<Tilt> tilts;       // what members take from the gradients of clusters' weights
  float *bar, *bar_t, *den_bar, *bars, *row_bar, *x_bar, *near_bar, *exacts, *white_rows, *root;
  float *keys_bar, *values_bar, *totals_bar, *spread_bar;
  float *values, *totals, *whiten, *x, *x_t, *phi, *white, *more, *top, *den, *out, *scores, *copy;

  void lay(Room& r) {
    r.take(values, C * lv), r.take(totals, C), r.take(whiten, (D + 1) * D);
    r.take(x, LANES * lx), r.take(x_t, (D + 1) * lanes), r.take(phi, C * lanes);
    r.take(white, D * lanes), r.take(more, M * lanes), r.take(top, LANES), r.take(den, LANES);
    r.take(out, LANES * lv), r.take(scores, span * lanes), r.take(copy, V % W ? span * lv : 0);
    if (!training) return;
    r.take(bar, LANES * lv), r.take(bar_t, wide_v * lanes), r.take(den_bar, LANES), r.take(bars, C * lanes);
    r.take(row_bar, LANES * lx), r.take(x_bar, D * lanes), r.take(near_bar, span * lanes);
    r.take(exacts, span * lanes), r.take(white_rows, LANES * ld), r.take(root, D * lanes);
    r.take(keys_bar, C * lx), r.take(values_bar, C * lv), r.take(totals_bar, C), r.take(spread_bar, M * ld);
  }

  // Of the first of these queries, among all.
  int64_t row(int64_t g, int64_t i) const {
    return ((b * call.kv + h) * call.groups + g) * call.queries + i;
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
        if (training) store(root + d * lanes + u * W, y);
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
  void near_changes(const Lanes& most, Lanes& total) {
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
        if (training) store(exacts + j * lanes + u * W, choose(reached(j, u), exact, Vec{}));
        total.v[u] += change;
      }
  }

  struct Values {
    const float* data;
    int64_t step;
  };

  // Near values in whole vectors.
  Values near_values() {
    const float* v = token(call.v, from);
    if (V % W == 0) return {v, call.v.token};
    for (int64_t j = 0; j < near; j++) {
      std::memcpy(copy + j * lv, v + j * call.v.token, V * sizeof(float));
      clear(copy + j * lv + V, lv - V);
    }
    return {copy, lv};
  }

  static int64_t rounded(int64_t width) { return (width + WIDEST - 1) / WIDEST * WIDEST; }

  void pull_back_near() {
    const float* weight = call.weight + n * call.tokens + from;
    const int64_t* cluster = call.cluster + n * call.tokens + from;
    const uint8_t* open = call.open + n * call.tokens + from;
    const int64_t step_v = rounded(V), step_d = rounded(D);
    product<true, false>(near, wide_v, LANES, scores, lanes, bar, lv,
                         call.v_bar + (n * call.tokens + from) * step_v, step_v);
    product<false, false>(near, LANES, V, token(call.v, from), call.v.token, bar_t, lanes, near_bar, lanes);
    for (int64_t j = 0; j < near; j++) {
      const float* estimates = phi + cluster[j] * lanes;
      float* of_cluster = bars + cluster[j] * lanes;
      Vec taken{};
      for (int u = 0; u < VECS; u++) {
        float *b = near_bar + j * lanes + u * W, *e = exacts + j * lanes + u * W;
        Vec change = load(b);
        if (open[j]) change += load(den_bar + u * W);
        change = choose(reached(j, u), change, Vec{});
        taken += load(estimates + u * W) * change;
        store(of_cluster + u * W, load(of_cluster + u * W) - change * weight[j]);
        store(e, load(e) * change);
      }
      call.weight_bar[n * call.tokens + from + j] -= sum(taken);
    }
    if (!call.exact) return;
    product<true, true>(D, LANES, near, token(call.k, from), call.k.token, exacts, lanes, x_bar, lanes);
    product<true, false>(near, padded(D), LANES, exacts, lanes, x, lx,
                         call.k_bar + (n * call.tokens + from) * step_d, step_d);
  }

  void pull_back_spread() {
    for (int64_t m = 0; m < M; m++)  // of 1 + h, which stops growing
      for (int u = 0; u < VECS; u++) {
        float *b = bars + m * lanes + u * W, *h = more + m * lanes + u * W;
        const Vec grown = load(h);
        store(h, choose(grown < all(SPREAD), load(b) / (grown + 1.0f), Vec{}));
      }
    transpose(D, LANES, white, lanes, white_rows, ld);
    product<true, false>(M, padded(D), LANES, more, lanes, white_rows, ld, spread_bar, ld);
    product<false, true>(D, LANES, M, call.spread + n * M * D, D, more, lanes, white, lanes);
    for (int64_t d = 0; d < D; d++)
      for (int u = 0; u < VECS; u++) {
        float* at = white + d * lanes + u * W;
        store(at, load(at) * load(root + d * lanes + u * W) * (2 * LOG2E));
      }
    product<true, false>(D, LANES, D, whiten, D, white, lanes, x_bar, lanes);
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

  // The members that the r-th query reads, and the largest of all its logits in base 2, which are
  // `unit` times those of x; returns how many there are.
  int64_t find(const int32_t (*chosen)[LANES], int64_t i, int64_t r, float unit, float& most) {
    const float* query = x + r * lx;
    const int64_t at = call.first + i + r;
    int64_t count = 0;
    most = top[r];
    for (int64_t s = 0; s < call.refine; s++) {
      const int64_t m = std::min<int64_t>(chosen[s][r], M - 1);
      for (int64_t u = 0; u < call.each; u++) {
        const int64_t row = (n * M + m) * call.each + u;
        if (call.k.data && std::abs(call.place[row] - at) <= call.widths[b]) continue;
        const float* key = call.members + row * (D + 2);
        const float score = dot(query, key, D + 1) * unit;
        if (!(score > 0.5f * ABSENT)) continue;
        found[count++] = {score, phi[m * lanes + r] * key[D + 1], call.member_values + row * (V + 1), row, m};
        most = std::max(most, score);
      }
    }
    return count;
  }

  // The exact weights of the members of each query's clusters in the place of their estimates.
  void members(int64_t i, int64_t t) {
    int32_t chosen[MOST][LANES];
    choose_clusters(chosen, call.refine);
    for (int64_t r = 0; r < t; r++) {
      float most;
      const int64_t count = find(chosen, i, r, 1.0f, most);
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

  // Their gradients; `bar` becomes that of the other sums.
  void pull_back_members(int64_t i, int64_t t) {
    int32_t chosen[MOST][LANES];
    choose_clusters(chosen, call.refine);
    for (int64_t r = 0; r < t; r++) {
      float most;
      const int64_t count = find(chosen, i, r, LOG2E, most);
      const float lift = std::exp2(top[r] - most);
      float *ob = bar + r * lv, *to = row_bar + r * lx;
      for (int64_t s = 0; s < count; s++) {
        const Member& one = found[s];
        const float *key = call.members + one.row * (D + 2), exact = std::exp2(one.score - most);
        const float own = phi[one.cluster * lanes + r] * lift;
        const float change = dot(one.value, ob, V) + one.value[V] * den_bar[r];
        float *key_bar = call.members_bar + one.row * (D + 2);
        float *value_bar = call.member_values_bar + one.row * (V + 1);
        const float part = exact - own * key[D + 1], by = exact * change;
        for (int64_t d = 0; d < V; d++) value_bar[d] += part * ob[d];
        value_bar[V] += part * den_bar[r];
        for (int64_t d = 0; d <= D; d++) {
          to[d] += by * key[d];
          key_bar[d] += by * x[r * lx + d];
        }
        key_bar[D + 1] -= own * change;
        tilts.push_back({one.cluster, r, change * key[D + 1] * lift});
      }
      for (int64_t j = 0; j < wide_v; j += W) store(ob + j, load(ob + j) * lift);
      den_bar[r] *= lift;
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
    Reader reader(call, unit / parts, false);
    const int64_t part = unit % parts;
    for (int64_t g = 0; g < call.groups; g++)
      for (int64_t i = blocks * part / parts; i < blocks * (part + 1) / parts; i++)
        reader.read(g, i * LANES, std::min<int64_t>(LANES, call.queries - i * LANES));
  });
}

API void subquad_read_clusters_backward(const ReadCall* given) {
  const ReadCall& call = *given;
  divide(call.batch * call.kv, call.threads, [&](int64_t n) {
    Reader reader(call, n, true);
    for (int64_t g = 0; g < call.groups; g++)
      for (int64_t i = 0; i < call.queries; i += LANES)
        reader.pull_back(g, i, std::min<int64_t>(LANES, call.queries - i));
    reader.end();
  });
}

}  // extern "C"
