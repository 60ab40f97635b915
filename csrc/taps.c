/* Weights of a triangle filter that widens with the reduction, with the conventions of Pillow's `resize`.
 *
 * https://github.com/python-pillow/Pillow/blob/main/src/libImaging/Resample.c, precompute_coeffs: the support is
 * max(1, scale), output i is centered at start + (i + 0.5) * scale, and it sees the samples whose centers are less than
 * the support away, rounded to whole samples. All is computed here once for all instruction sets, in doubles without
 * contraction, so that a weight is the same number on every machine.
 *
 * A sample that is the mean of several parts gets the sum of their weights. That spreads each weight over a sample, as
 * the mean spread what it weighs: twice the variance of the parts of a sample, (1 - 1 / parts^2) / 12, is added to
 * the triangle's, support^2 / 6. Narrowing the triangle by all of it would take 1 - 1 / parts^2 off support^2. Of
 * photographs reduced by 2, 4 and 8, 3/4 of that came nearest to the filter over unreduced samples: at scales of 2 to 3
 * their mean difference is half of what it is with none (measured). */
#include "taps.h"

#include <math.h>
#include <string.h>

#define ALIGNMENT 64

/* What an axis and an output size come to. */
typedef struct {
  double scale, support;
  double reach; /* the support, and as far as from a sample's center to that of its outermost part */
} triangle;

static triangle triangle_of(const pl_axis *axis, int size) {
  const double scale = axis->length / size, part = 1.0 / axis->parts;
  double support = scale > 1.0 ? scale : 1.0;
  if (axis->parts > 1) support = sqrt(support * support - 0.75 * (1.0 - part * part));
  return (triangle){scale, support, support + (0.5 - 0.5 * part)};
}

static int clamp(int value, int low, int high) { return value < low ? low : value > high ? high : value; }

static double centre_of(const pl_axis *axis, triangle filter, int i) { return axis->start + (i + 0.5) * filter.scale; }

/* Where there is nothing to see, as beyond a clipped edge, the nearest sample is seen. */
static int first_of(const pl_axis *axis, triangle filter, double centre) {
  return clamp((int)(centre - filter.reach + 0.5), axis->low, axis->high - 1);
}

static int last_of(const pl_axis *axis, triangle filter, double centre, int first) {
  return clamp((int)(centre + filter.reach + 0.5), first + 1, axis->high);
}

void pl_axis_extent(const pl_axis *axis, int size, int *first, int *last) {
  triangle filter = triangle_of(axis, size);
  double end = centre_of(axis, filter, size - 1);
  *first = first_of(axis, filter, centre_of(axis, filter, 0));
  *last = last_of(axis, filter, end, first_of(axis, filter, end));
}

static int rounded_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

static size_t aligned(size_t num_bytes) { return (num_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Return how many taps an output has at most, with one that a start moved back may cost, and evenness. */
static int most_taps(const pl_axis *axis, int size) {
  int longest = (int)(2.0 * triangle_of(axis, size).reach) + 2;
  int available = axis->high - axis->low;
  return rounded_up((longest < available ? longest : available) + 1, 2);
}

size_t pl_taps_bytes(const pl_axis *axis, int size) {
  size_t outputs = (size_t)size;
  return aligned(outputs * sizeof(int32_t)) + aligned(outputs * (size_t)most_taps(axis, size) * sizeof(int16_t));
}

/* Return the weight of a sample, not yet normalized: the sum of its parts', which are 0 from the support on. */
static double weight_of(const pl_axis *axis, int sample, double centre, double per_support) {
  double sum = 0.0;
  for (int part = 0; part < axis->parts; part++) {
    const double place = sample + (part + 0.5) / axis->parts;
    if (place < axis->from || place > axis->to) continue;
    const double weight = 1.0 - fabs(place - centre) * per_support;
    sum += weight > 0.0 ? weight : 0.0;
  }
  return sum;
}

/* Write the weights of samples [first, last) as integers that sum to 1 << PL_WEIGHT_BITS exactly: differences of the
 * rounded running sum. However many share the whole, no error piles up, as it would on the largest if each were
 * rounded by itself. Return whether any sample has a weight. */
static int write_weights(const pl_axis *axis, int first, int last, double centre, double per_support,
                         int16_t *weights) {
  double total = 0.0;
  for (int sample = first; sample < last; sample++) total += weight_of(axis, sample, centre, per_support);
  if (!(total > 0.0)) return 0;
  const double unit = (1 << PL_WEIGHT_BITS) / total;
  double sum = 0.5; /* so that cutting it off rounds it */
  int given = 0;
  for (int sample = first; sample < last; sample++) {
    sum += unit * weight_of(axis, sample, centre, per_support);
    *weights++ = (int16_t)((int)sum - given);
    given = (int)sum;
  }
  return 1;
}

static int smaller(int a, int b) { return a < b ? a : b; }

static int larger(int a, int b) { return a > b ? a : b; }

/* Write where outputs start, and return how many taps the longest needs from there. */
static int write_starts(const pl_axis *axis, triangle filter, int size, int origin, int multiple, int32_t *starts) {
  int longest = 0;
  for (int i = 0; i < size; i++) {
    const double centre = centre_of(axis, filter, i);
    const int first = first_of(axis, filter, centre);
    starts[i] = (first - origin) & ~(multiple - 1);
    const int num_taps = last_of(axis, filter, centre, first) - origin - starts[i];
    if (num_taps > longest) longest = num_taps;
  }
  return longest;
}

void pl_taps_make(const pl_axis *axis, int size, int origin, int multiple, void *memory, pl_taps *taps) {
  const triangle filter = triangle_of(axis, size);
  const double per_support = 1.0 / filter.support;
  int16_t *weights = (int16_t *)(void *)((char *)memory + aligned((size_t)size * sizeof(int32_t)));
  int32_t *starts = memory;
  const int num_taps = rounded_up(write_starts(axis, filter, size, origin, multiple, starts), 2);
  *taps = (pl_taps){size, num_taps, starts, weights};
  /* The last outputs start earlier than they need, so that none reads further than the samples go. */
  const int furthest = rounded_up(axis->high - origin, multiple) - num_taps;
  memset(weights, 0, (size_t)size * (size_t)num_taps * sizeof(int16_t));
  for (int i = 0; i < size; i++, weights += num_taps) {
    const double centre = centre_of(axis, filter, i);
    starts[i] = smaller(starts[i], larger(furthest, 0));
    /* Samples of the run that are not the output's are the support away, and get nothing. */
    const int start = origin + starts[i], first = larger(start, axis->low);
    const int last = smaller(start + num_taps, axis->high);
    if (!write_weights(axis, first, last, centre, per_support, weights + (first - start))) {
      weights[first_of(axis, filter, centre) - start] = 1 << PL_WEIGHT_BITS; /* the nearest there is */
    }
  }
}
