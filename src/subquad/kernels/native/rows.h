// Tensors of rows, as Python hands them over.
#pragma once

#include <cstdint>

// (B, heads, n, width) with element (b, h, i, d) at data[b*batch + h*head + i*token + d].
struct Strided {
  float* data;
  int64_t batch, head, token;
};
