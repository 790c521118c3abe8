// The stored rows of one sequence and head, as attention reads them: eight dimensions at a time.

// Rows of pages in one codec. Strides are in elements.
template <int CODEC, typename P, typename S>
struct PageRows {
  P codes;
  S scales;
  int64_t stride;
  int64_t scale_stride;
  const threadgroup float2* table;

  // Dimensions 8 * unit to 8 * unit + 7 of a row, before its scale; codes are read as words.
  inline void load(int row, int unit, thread float* x) const {
    P codes_of_row = codes + row * stride;
    if (CODEC == RAW) {
      for (int i = 0; i < UNIT; i++) {
        x[i] = float(codes_of_row[unit * UNIT + i]);
      }
    } else if (CODEC == INT8) {
      const device uint* words = (const device uint*)codes_of_row + unit * 2;
      uint low = words[0];
      uint high = words[1];
      for (int i = 0; i < 4; i++) {
        x[i] = float(int(low << (24 - 8 * i)) >> 24);
        x[i + 4] = float(int(high << (24 - 8 * i)) >> 24);
      }
    } else if (CODEC == TURBO4) {
      uint word = ((const device uint*)codes_of_row)[unit];
      for (int i = 0; i < 4; i++) {
        float2 both = table[(word >> (8 * i)) & 255u];
        x[2 * i] = both.x;
        x[2 * i + 1] = both.y;
      }
    } else {
      // Three bytes, which may start at an odd address: in 16-bit words, as a row need not be a multiple of four bytes.
      const device ushort* words = (const device ushort*)codes_of_row + unit * 3 / 2;
      uint bits = (uint(words[0]) | (uint(words[1]) << 16)) >> (8 * (unit & 1));
      for (int i = 0; i < 4; i++) {
        float2 both = table[(bits >> (6 * i)) & 63u];
        x[2 * i] = both.x;
        x[2 * i + 1] = both.y;
      }
    }
  }

  inline float scale(int row) const {
    return CODEC == RAW ? 1.0f : half_value(as_type<ushort>(scales[row * scale_stride]));
  }

  inline int position(int row) const {
    return row;
  }
};

template <int CODEC, typename P, typename S>
inline PageRows<CODEC, P, S> page_rows(
    P codes, S scales, int64_t stride, int64_t scale_stride, const threadgroup float2* table) {
  PageRows<CODEC, P, S> rows = {codes, scales, stride, scale_stride, table};
  return rows;
}

// The raw rows: sinks, then the tail behind the pages.
template <typename P>
struct RawRows {
  P sink;
  P tail;
  int64_t sink_stride;
  int64_t tail_stride;
  int sinks;
  int folded;

  inline void load(int row, int unit, thread float* x) const {
    P values = row < sinks ? sink + row * sink_stride : tail + (row - sinks) * tail_stride;
    for (int i = 0; i < UNIT; i++) {
      x[i] = float(values[unit * UNIT + i]);
    }
  }

  inline float scale(int row) const {
    return 1.0f;
  }

  inline int position(int row) const {
    return row < sinks ? row : folded + row - sinks;
  }
};

template <typename P>
inline RawRows<P> raw_rows(P sink, P tail, int64_t sink_stride, int64_t tail_stride, int sinks, int folded) {
  RawRows<P> rows = {sink, tail, sink_stride, tail_stride, sinks, folded};
  return rows;
}

// What the centres of pages add to the logits of their rows: R_K q · centre, for one sequence and head.
template <bool CENTRED, typename P, typename S>
struct PageCenters {
  P values;
  S page_of;
  int64_t stride;  // of query vectors
  int64_t page_stride;

  inline float add(float logit, int vector, int row) const {
    return CENTRED ? logit + values[vector * stride + page_of[row] * page_stride] : logit;
  }
};

template <bool CENTRED, typename P, typename S>
inline PageCenters<CENTRED, P, S> page_centers(P values, S page_of, int64_t stride, int64_t page_stride) {
  PageCenters<CENTRED, P, S> centers = {values, page_of, stride, page_stride};
  return centers;
}

// Which keys the queries of a step may see. Query row r stands at position first + r.
struct Step {
  int rows;
  int first;
  int window;  // 0: none
  int keep;
  int vector;  // the first of the N query vectors
  int vectors;

  inline bool sees(int n, int position) const {
    int own = first + (vector + n) % rows;
    return position <= own && (window == 0 || position > own - window || position < keep);
  }

  inline bool sees_none(int low, int high) const {
    return low > first + rows - 1 || (window != 0 && high <= first - window && low >= keep);
  }
};

// One simdgroup attends to its tiles of 32 rows of [start, stop). L lanes share a row, so 32 / L rows are read at once,
// each for all N query vectors. Lane j ends up with the logits of row j of the tile: scales, masks and the softmax are
// per lane, and so is what centres add. acc holds this lane's dimensions and must be summed over the groups of L lanes
// afterwards.
template <int D, int N, typename K, typename V, typename C>
inline void attend_tiles(
    const thread K& k,
    const thread V& v,
    const thread C& centers,
    const thread Step& step,
    int start,
    int stop,
    int lane,
    int simd,
    const thread float (&q)[N][UNIT],
    thread float (&acc)[N][UNIT],
    thread float (&peak)[N],
    thread float (&total)[N]) {
  constexpr int L = lanes_of_row(D);
  int unit = lane % L;
  int base = lane - unit;
  for (int tile = start + simd * LANES; tile < stop; tile += THREADS) {
    if (step.sees_none(k.position(tile), k.position(min(tile + LANES, stop) - 1))) {
      continue;
    }
    float logit[N];
    for (int n = 0; n < N; n++) {
      logit[n] = 0.0f;
    }
    for (int s = 0; s < L; s++) {
      float x[UNIT];
      for (int i = 0; i < UNIT; i++) {
        x[i] = 0.0f;
      }
      if (unit < D / UNIT) {
        k.load(min(tile + base + s, stop - 1), unit, x);
      }
      for (int n = 0; n < N; n++) {
        float sum = 0.0f;
        for (int i = 0; i < UNIT; i++) {
          sum += q[n][i] * x[i];
        }
        for (int offset = L / 2; offset > 0; offset /= 2) {
          sum += simd_shuffle_xor(sum, offset);
        }
        logit[n] = unit == s ? sum : logit[n];
      }
    }

    int mine = tile + lane;
    bool live = mine < stop;
    int row = live ? mine : stop - 1;
    int position = k.position(row);
    float k_scale = k.scale(row);
    float v_scale = v.scale(row);
    float weight[N];
    for (int n = 0; n < N; n++) {
      bool seen = live && step.sees(n, position);
      int vector = min(step.vector + n, step.vectors - 1);
      float x = seen ? centers.add(logit[n] * k_scale, vector, row) : LOWEST;
      float top = max(peak[n], simd_max(x));
      float shrink = precise::exp2(peak[n] - top);
      float p = seen ? precise::exp2(x - top) : 0.0f;
      total[n] = total[n] * shrink + simd_sum(p);
      peak[n] = top;
      weight[n] = seen ? p * v_scale : -1.0f;  // a hidden row adds nothing, not even where it is not finite
      for (int i = 0; i < UNIT; i++) {
        acc[n][i] *= shrink;
      }
    }

    for (int s = 0; s < L; s++) {
      float x[UNIT];
      for (int i = 0; i < UNIT; i++) {
        x[i] = 0.0f;
      }
      if (unit < D / UNIT) {
        v.load(min(tile + base + s, stop - 1), unit, x);
      }
      for (int n = 0; n < N; n++) {
        float w = simd_shuffle(weight[n], ushort(base + s));
        if (w >= 0.0f) {
          for (int i = 0; i < UNIT; i++) {
            acc[n][i] += w * x[i];
          }
        }
      }
    }
  }
}
