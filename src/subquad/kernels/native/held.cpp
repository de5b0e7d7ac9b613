// Causal attention over a fixed number of held keys, forward and backward: the algorithm of
// `subquad/attention/hybrid/stream.py`.
//
// A token keeps one place from when it comes until it is let go, so that tables of keys and values
// change by a column or row at a time; `order` lists places by the age of their tokens. Logits are
// in base 2. A unit of work is a batch row and key-value head.

#include <algorithm>
#include <cmath>
#include <vector>

#include "rows.h"
#include "threads.h"
#include "vectors.h"

namespace {

constexpr int64_t BLOCK = 16;             // tokens whose queries are answered at a time, at most
constexpr float EMPTY = -INFINITY;        // logit of an empty place
constexpr float ABSENT = -1e30f;          // log-sum of a row without keys

}  // namespace

extern "C" {

// Origins count the places of the incoming state first, then the tokens.
struct HeldCall {
  Strided q, k, v, num, num_bar, q_bar, k_bar, v_bar;
  const uint8_t* open;                     // (B, S), or null: all
  const float *state, *mass_in;            // (B, Hkv, N, D + V), (B, Hkv, N)
  const int64_t* held_in;                  // (B)
  float *lse, *mass, *state_bar;           // (B, H, L), (B, Hkv, N), (B, Hkv, N, D + V)
  const float* lse_bar;                    // (B, H, L), or null
  int64_t *held, *places;                  // (B), origins (B, Hkv, N) of what is held at the end
  int32_t* gone;                           // origins (B, Hkv, most, block) of what was let go
  int64_t batch, kv, groups, tokens, early, width, value, size, sinks, heavy, block, most;
  float scale, fading;                     // of logits; of masses when keys are let go
  int32_t threads, unused;
};

// A few tokens, in place, in the order that Python keeps: places by age. What the four are made of
// and the state is `type`, of vectors.h.
struct HeldStep {
  Strided q, k, v, out;
  const uint8_t* open;                     // (B, T), or null: all
  void* state;                             // (B, Hkv, N, D + V)
  float* mass;                             // (B, Hkv, N)
  const int64_t* held_in;                  // (B)
  int64_t* held;                           // (B), other memory
  int64_t batch, kv, groups, tokens, width, value, size, sinks, heavy, block;
  float scale, fading;
  int32_t threads, type;
};

}  // extern "C"

namespace {

// Of `count` masses the `block` least, in increasing order; the first of equals.
template <class Mass>
void find_least(int64_t count, int64_t block, const Mass& mass, int32_t* found) {
  const auto less = [](float x, float y) { return x < y || (x == x && y != y); };  // NaN is the largest
  for (int64_t i = 0; i < count; i++) {
    int64_t at = std::min(i, block);
    while (at > 0 && less(mass(i), mass(found[at - 1]))) at--;
    if (at == block) continue;
    for (int64_t later = std::min(i, block - 1); later > at; later--) found[later] = found[later - 1];
    found[at] = (int32_t)i;
  }
}

// Weights of a row of logits, their maximum found before: exponentials over their sum, which it returns.
float normalise(float* s, int64_t wide, float highest) {
  Vec total{};
  for (int64_t i = 0; i < wide; i += W) {
    const Vec e = exp2(load(s + i) - highest);
    store(s + i, e);
    total += e;
  }
  const float whole = sum(total), share = 1 / whole;
  for (int64_t i = 0; i < wide; i += W) store(s + i, load(s + i) * share);
  return whole;
}

float maximum(const float* s, int64_t wide) {
  Vec most = all(EMPTY);
  for (int64_t i = 0; i < wide; i += W) most = larger(load(s + i), most);
  return top(most);
}

// Tokens first ... last - 1, all answered or none; keys may be let go behind them.
struct Step {
  int64_t first, last;
  bool asked, lets_go;
};

class Held {
 public:
  Held(const HeldCall& call, int64_t n, bool training)
      : call(call),
        n(n),
        b(n / call.kv),
        h(n % call.kv),
        D(call.width),
        V(call.value),
        N(call.size),
        ld(pitch(D)),
        lv(pitch(V)),
        ln(pitch(N)),
        wide_n(padded(N)),
        wide_d(padded(D)),
        wide_v(padded(V)),
        room([&](Room& r) { lay(r, training); }),
        training(training),
        held(call.held_in[b]),
        origin(N, -1),
        place(call.tokens, -1),
        least(call.block) {
    clear(keys_t, D * ln), clear(values, N * lv), clear(mass, wide_n);
    for (int64_t i = 0; i < wide_n; i++) bias[i] = EMPTY;
    if (training) clear(keys, N * ld), clear(values_t, V * ln), clear(k_bar, N * ld), clear(v_bar, N * lv);
    for (int64_t p = 0; p < held; p++) {
      order.push_back((int32_t)p), origin[p] = (int32_t)p;
      mass[p] = call.mass_in ? call.mass_in[n * N + p] : 0;
    }
    for (int64_t p = N - 1; p >= held; p--) empty.push_back((int32_t)p);
  }

  void forward() {
    for (int64_t p = 0; p < held; p++) enter(p);
    for (int64_t at = 0, times = 0; at < call.tokens;) {
      const Step step = next(at);
      for (int64_t t = step.first; t < step.last; t++)
        if (opened(t)) enter(append(t));
      if (step.asked) answer(step);
      if (step.lets_go) let_go(call.gone + (n * call.most + times++) * call.block);
      at = step.last;
    }
    for (int64_t i = 0; i < N; i++) {
      const bool there = i < held;
      call.places[n * N + i] = there ? origin[order[i]] : 0;
      call.mass[n * N + i] = there ? mass[order[i]] : 0;
    }
    if (h == 0) call.held[b] = held;
  }

  void backward() {
    // What came and went once more, without numbers.
    std::vector<Step> steps;
    std::vector<int32_t> left;  // places that were let go, `block` each time
    for (int64_t at = 0, times = 0; at < call.tokens;) {
      const Step step = next(at);
      for (int64_t t = step.first; t < step.last; t++)
        if (opened(t)) append(t);
      if (step.lets_go) {
        const int32_t* gone = call.gone + (n * call.most + times++) * call.block;
        for (int64_t i = 0; i < call.block; i++) {
          const int32_t p = gone[i] < N ? gone[i] : place[gone[i] - N];
          left.push_back(p);
          remove(p);
        }
      }
      steps.push_back(step);
      at = step.last;
    }
    for (int32_t p : order) enter(p);
    int64_t times = (int64_t)left.size() / call.block;
    for (int64_t s = (int64_t)steps.size() - 1; s >= 0; s--) {
      const Step& step = steps[s];
      if (step.lets_go) {
        times--;
        const int32_t* gone = call.gone + (n * call.most + times) * call.block;
        for (int64_t i = 0; i < call.block; i++) {
          const int32_t p = left[times * call.block + i];
          origin[p] = gone[i];
          enter(p);
        }
      }
      if (step.asked) pull_back(step);
      for (int64_t t = step.first; t < step.last; t++)
        if (opened(t)) {
          const int64_t p = place[t];
          std::memcpy(row(call.k_bar, h, t), k_bar + p * ld, D * sizeof(float));
          std::memcpy(row(call.v_bar, h, t), v_bar + p * lv, V * sizeof(float));
          leave(p);
        } else {
          clear(row(call.k_bar, h, t), D), clear(row(call.v_bar, h, t), V);
        }
    }
    float* to = call.state_bar + n * N * (D + V);
    const int64_t before = call.held_in[b];
    for (int64_t p = 0; p < before; p++, to += D + V) {
      std::memcpy(to, k_bar + p * ld, D * sizeof(float));
      std::memcpy(to + D, v_bar + p * lv, V * sizeof(float));
    }
    clear(to, (N - before) * (D + V));
  }

 private:
  const HeldCall& call;
  const int64_t n, b, h, D, V, N, ld, lv, ln, wide_n, wide_d, wide_v;
  Room room;
  const bool training;
  int64_t held;
  std::vector<int32_t> order, empty;    // places by age, places without a token
  std::vector<int32_t> origin, place;   // of what a place holds; of a token
  std::vector<int32_t> least;           // places of least mass
  float *keys_t, *values, *keys, *values_t, *bias, *mass;
  float *x, *scores, *num, *bar, *change, *k_bar, *v_bar;

  void lay(Room& r, bool training) {
    r.take(keys_t, D * ln), r.take(values, N * lv), r.take(bias, wide_n), r.take(mass, wide_n);
    r.take(x, BLOCK * ld), r.take(scores, BLOCK * ln), r.take(num, BLOCK * std::max(ld, lv));
    if (!training) return;
    r.take(keys, N * ld), r.take(values_t, V * ln), r.take(k_bar, N * ld), r.take(v_bar, N * lv);
    r.take(bar, BLOCK * lv), r.take(change, BLOCK * ln);
  }

  static void clear(float* p, int64_t floats) {
    if (floats > 0) std::memset(p, 0, floats * sizeof(float));
  }

  bool opened(int64_t t) const { return !call.open || call.open[b * call.tokens + t]; }

  float* row(const Strided& rows, int64_t head, int64_t i) const {
    return rows.data + b * rows.batch + head * rows.head + i * rows.token;
  }

  // ---- what is held ----

  // The tokens from `at` up to one that fills all places, those with and without queries apart.
  Step next(int64_t at) const {
    const int64_t end = std::min(at < call.early ? call.early : call.tokens, at + BLOCK);
    int64_t last = at, count = held;
    while (last < end && count < N) count += opened(last++);
    return {at, last, at >= call.early, count == N};
  }

  int64_t append(int64_t t) {
    const int32_t p = empty.back();
    empty.pop_back(), order.push_back(p);
    origin[p] = (int32_t)(N + t), place[t] = p, mass[p] = 0, held++;
    return p;
  }

  void remove(int32_t p) {
    order.erase(std::find(order.begin(), order.end(), p));
    empty.push_back(p), held--;
  }

  // The token of place p, as numbers.
  void enter(int64_t p) {
    const int64_t from = origin[p];
    const float *k, *v;
    if (from < N) {
      k = call.state + (n * N + from) * (D + V), v = k + D;
    } else {
      k = row(call.k, h, from - N), v = row(call.v, h, from - N);
    }
    for (int64_t d = 0; d < D; d++) keys_t[d * ln + p] = k[d];
    std::memcpy(values + p * lv, v, V * sizeof(float));
    bias[p] = 0;
    if (!training) return;
    std::memcpy(keys + p * ld, k, D * sizeof(float));
    for (int64_t d = 0; d < V; d++) values_t[d * ln + p] = v[d];
    clear(k_bar + p * ld, ld), clear(v_bar + p * lv, lv);
  }

  // Zeros: not a number, with a weight of zero, would still not be one.
  void leave(int64_t p) {
    for (int64_t d = 0; d < D; d++) keys_t[d * ln + p] = 0;
    clear(values + p * lv, lv);
    bias[p] = EMPTY;
    if (!training) return;
    clear(keys + p * ld, ld);
    for (int64_t d = 0; d < V; d++) values_t[d * ln + p] = 0;
  }

  // Of those between the first tokens and the last, the ones of least mass; the oldest of equals.
  void let_go(int32_t* gone) {
    const auto mass_of = [&](int64_t i) { return mass[order[call.sinks + i]]; };
    find_least(call.heavy + call.block, call.block, mass_of, least.data());
    for (int32_t& i : least) i = order[call.sinks + i];
    for (int64_t i = 0; i < call.block; i++) {
      const int32_t p = least[i];
      gone[i] = origin[p];
      leave(p);
      remove(p);
    }
    for (int64_t i = 0; i < wide_n; i += W) store(mass + i, load(mass + i) * call.fading);
  }

  // ---- queries ----

  // Logits of the queries of a step; places of later tokens are EMPTY.
  void logits(const Step& step, int64_t head) {
    const int64_t rows = step.last - step.first;
    for (int64_t r = 0; r < rows; r++) {
      const float* q = row(call.q, head, step.first + r - call.early);
      for (int64_t d = 0; d < D; d++) x[r * ld + d] = q[d] * (call.scale * LOG2E);
      clear(x + r * ld + D, ld - D);
    }
    product<false, false>(rows, wide_n, D, x, ld, keys_t, ln, scores, ln);
    for (int64_t r = 0; r < rows; r++) {
      float* s = scores + r * ln;
      for (int64_t i = 0; i < wide_n; i += W) store(s + i, load(s + i) + load(bias + i));
      for (int64_t later = r + 1; later < rows; later++)
        if (opened(step.first + later)) s[place[step.first + later]] = EMPTY;
    }
  }

  void answer(const Step& step) {
    const int64_t rows = step.last - step.first;
    int64_t before = held;
    for (int64_t r = 0; r < rows; r++) before -= opened(step.first + r);
    for (int64_t g = 0; g < call.groups; g++) {
      const int64_t head = h * call.groups + g;
      logits(step, head);
      int64_t there = before;
      float* lse = call.lse + (b * call.kv * call.groups + head) * (call.tokens - call.early) - call.early;
      for (int64_t r = 0; r < rows; r++) {
        float* s = scores + r * ln;
        there += opened(step.first + r);
        if (there == 0) {  // no key yet
          clear(s, wide_n);
          lse[step.first + r] = ABSENT;
          continue;
        }
        const float highest = maximum(s, wide_n);
        lse[step.first + r] = (highest + std::log2(normalise(s, wide_n, highest))) * LN2;
        if (opened(step.first + r))
          for (int64_t i = 0; i < wide_n; i += W) store(mass + i, load(mass + i) + load(s + i));
      }
      product<false, false>(rows, wide_v, N, scores, ln, values, lv, num, lv);
      for (int64_t r = 0; r < rows; r++)
        std::memcpy(row(call.num, head, step.first + r - call.early), num + r * lv, V * sizeof(float));
    }
  }

  void pull_back(const Step& step) {
    const int64_t rows = step.last - step.first, asked = call.tokens - call.early;
    for (int64_t g = 0; g < call.groups; g++) {
      const int64_t head = h * call.groups + g;
      const int64_t at = (b * call.kv * call.groups + head) * asked + step.first - call.early;
      logits(step, head);
      for (int64_t r = 0; r < rows; r++) {
        std::memcpy(bar + r * lv, row(call.num_bar, head, step.first + r - call.early), V * sizeof(float));
        clear(bar + r * lv + V, lv - V);
        float* s = scores + r * ln;
        const float lse = call.lse[at + r] * LOG2E;
        if (call.lse[at + r] <= 0.1f * ABSENT)
          clear(s, wide_n);
        else
          for (int64_t i = 0; i < wide_n; i += W) store(s + i, exp2(load(s + i) - lse));
      }
      product<false, false>(rows, wide_n, V, bar, lv, values_t, ln, change, ln);
      product<true, true>(N, wide_v, rows, scores, ln, bar, lv, v_bar, lv);
      for (int64_t r = 0; r < rows; r++) {
        const float* out = row(call.num, head, step.first + r - call.early);
        float delta = call.lse_bar ? -call.lse_bar[at + r] : 0;
        for (int64_t d = 0; d < V; d++) delta += bar[r * lv + d] * out[d];
        float *s = scores + r * ln, *c = change + r * ln;
        for (int64_t i = 0; i < wide_n; i += W) store(c + i, load(s + i) * (load(c + i) - delta));
        for (int64_t d = 0; d < wide_d; d += W) store(x + r * ld + d, load(x + r * ld + d) * LN2);
      }
      product<true, true>(N, wide_d, rows, change, ln, x, ld, k_bar, ld);
      product<false, false>(rows, wide_d, N, change, ln, keys, ld, num, ld);
      for (int64_t r = 0; r < rows; r++) {
        float* to = row(call.q_bar, head, step.first + r - call.early);
        for (int64_t d = 0; d < D; d++) to[d] = num[r * ld + d] * call.scale;
      }
    }
  }
};

// The tokens of a step for one batch row and key-value head.
class Taken {
 public:
  Taken(const HeldStep& call, int64_t n)
      : call(call),
        b(n / call.kv),
        h(n % call.kv),
        D(call.width),
        V(call.value),
        N(call.size),
        wide_n(padded(N)),
        bytes(call.type == FLOAT32 ? 4 : 2),
        state((char*)call.state + n * N * (D + V) * bytes),
        mass(call.mass + n * N),
        held(call.held_in[b]),
        room([&](Room& r) {
          r.take(scores, wide_n), r.take(x, padded(D)), r.take(num, padded(V));
          r.take(copy, call.type == FLOAT32 ? 0 : N * (D + V));
        }),
        rows(call.type == FLOAT32 ? (const float*)state : copy),
        least(call.block) {}

  void run() {
    for (int64_t t = 0; t < call.tokens; t++) {
      const bool opened = !call.open || call.open[b * call.tokens + t];
      if (opened) {
        char* to = state + held * (D + V) * bytes;
        std::memcpy(to, at(call.k, h, t), D * bytes);
        std::memcpy(to + D * bytes, at(call.v, h, t), V * bytes);
        mass[held++] = 0;
      }
      if (call.type != FLOAT32) {
        read_row(copy + ready * (D + V), state, call.type, ready * (D + V), 1, (held - ready) * (D + V));
        ready = held;
      }
      for (int64_t g = 0; g < call.groups; g++) answer(h * call.groups + g, t, opened);
      if (held == N) let_go();
    }
    if (h == 0) call.held[b] = held;
  }

 private:
  const HeldStep& call;
  const int64_t b, h, D, V, N, wide_n, bytes;
  char* const state;
  float* const mass;
  int64_t held, ready = 0;  // places that are filled, and that `copy` has
  float *scores, *x, *num, *copy;
  Room room;
  const float* const rows;  // keys and values in float32: the state, or `copy`
  std::vector<int32_t> least;

  char* at(const Strided& tensor, int64_t head, int64_t i) const {
    return (char*)tensor.data + (b * tensor.batch + head * tensor.head + i * tensor.token) * bytes;
  }

  void answer(int64_t head, int64_t t, bool heard) {
    read_row(x, at(call.q, head, t), call.type, 0, 1, D);
    for (int64_t d = 0; d < D; d++) x[d] *= call.scale * LOG2E;
    const int64_t whole = D / W * W;
    for (int64_t j = 0; j < held; j++) {
      const float* k = rows + j * (D + V);
      Vec total{};
      for (int64_t d = 0; d < whole; d += W) total += load(x + d) * load(k + d);
      float s = sum(total);
      for (int64_t d = whole; d < D; d++) s += x[d] * k[d];
      scores[j] = s;
    }
    const int64_t wide = padded(held);
    for (int64_t j = held; j < wide; j++) scores[j] = EMPTY;
    if (held) normalise(scores, wide, maximum(scores, wide));
    if (heard)
      for (int64_t j = 0; j < held; j++) mass[j] += scores[j];
    const int64_t even = V / W * W;
    product<false, false>(1, even, held, scores, wide_n, rows + D, D + V, num, V);
    for (int64_t d = even; d < V; d++) {
      num[d] = 0;
      for (int64_t j = 0; j < held; j++) num[d] += scores[j] * rows[j * (D + V) + D + d];
    }
    write_row(at(call.out, head, t), call.type, 0, num, V);
  }

  void let_go() {
    const int64_t first = call.sinks, width = (D + V) * bytes;
    find_least(call.heavy + call.block, call.block, [&](int64_t i) { return mass[first + i]; }, least.data());
    std::sort(least.begin(), least.end());
    int64_t to = first + least[0];
    ready = to;
    for (int64_t i = 0; i < call.block; i++) {
      const int64_t from = first + least[i] + 1, end = i + 1 < call.block ? first + least[i + 1] : N;
      std::memmove(state + to * width, state + from * width, (end - from) * width);
      std::memmove(mass + to, mass + from, (end - from) * sizeof(float));
      to += end - from;
    }
    held = to;
    std::memset(state + held * width, 0, (N - held) * width);
    for (int64_t j = 0; j < N; j++) mass[j] = j < held ? mass[j] * call.fading : 0;
  }
};

}  // namespace

#define API __attribute__((visibility("default")))

extern "C" {

API int subquad_held_call_size() { return (int)sizeof(HeldCall); }

API void subquad_held(const HeldCall* given) {
  divide(given->batch * given->kv, given->threads, [&](int64_t n) { Held(*given, n, false).forward(); });
}

API int subquad_held_step_size() { return (int)sizeof(HeldStep); }

API void subquad_held_step(const HeldStep* given) {
  divide(given->batch * given->kv, given->threads, [&](int64_t n) { Taken(*given, n).run(); });
}

API void subquad_held_backward(const HeldCall* given) {
  divide(given->batch * given->kv, given->threads, [&](int64_t n) { Held(*given, n, true).backward(); });
}

}  // extern "C"
