/* Walks the scans of a file, checks that together they say all of every coefficient, and collects them. */
#include "coefficients.h"

#include <string.h>

#define MAX_SCANS 100 /* encoders write ten; each may cost a walk over all blocks */
#define MAX_LOW 13    /* T.81, G.1.1.1 */

static const char CUT_OFF[] = "cut off", SCAN_HEADER[] = "damaged (a scan header)";

typedef struct {
  pl_jpeg *jpeg;
  pl_scan *scan;
  const pl_record *shape;
  pl_scratch *scratch;
  pl_coefficients *coefficients;
  pl_read_band *read_band;
  pl_band_reader reader;
  uint8_t *plain;   /* the bytes of a restart interval */
  pl_codes *codes;  /* DC and AC of each component of the scan */
} walk;

/* ---- what a scan may say ----------------------------------------------------------------------------------------- */

/* Note which bits of a component the scan adds. Libjpeg warns where they do not follow those known. */
static const char *note_bits(const pl_scan *scan, pl_component_blocks *component) {
  for (int at = scan->first; at <= scan->last; at++) {
    int known_to = component->low[at];
    if (known_to != (scan->high == 0 ? -1 : scan->high)) return SCAN_HEADER;
    component->low[at] = (int8_t)scan->low;
  }
  return scan->first > 0 && component->low[0] < 0 ? SCAN_HEADER : NULL;
}

static const char *check_scan(const walk *w) {
  const pl_scan *scan = w->scan;
  if (!w->jpeg->is_progressive) {
    return scan->first == 0 && scan->last == 63 && scan->high == 0 && scan->low == 0 ? NULL : SCAN_HEADER;
  }
  if (scan->first == 0 && scan->last != 0) return SCAN_HEADER;
  if (scan->first > 0 && scan->num_components != 1) return SCAN_HEADER;
  if (scan->low > MAX_LOW || (scan->high != 0 && scan->high != scan->low + 1)) return SCAN_HEADER;
  return NULL;
}

/* Build the look-up tables that the scan needs of those that stand now. */
static const char *build_tables(walk *w) {
  bool needs_dc = w->scan->first == 0 && w->scan->high == 0, needs_ac = w->scan->last > 0;
  for (int i = 0; i < w->scan->num_components; i++) {
    int dc = w->scan->dc_table[i], ac = w->scan->ac_table[i];
    if ((needs_dc && !w->jpeg->has_dc[dc]) || (needs_ac && !w->jpeg->has_ac[ac])) return "damaged (a table is missing)";
    bool is_sound = !needs_dc || pl_codes_build(&w->codes[2 * i], w->jpeg->dc[dc], false);
    if (needs_ac) is_sound = is_sound && pl_codes_build(&w->codes[2 * i + 1], w->jpeg->ac[ac], true);
    if (!is_sound) return "damaged (a Huffman table)";
  }
  return NULL;
}

static const char *begin_scan(walk *w) {
  const char *reason = check_scan(w);
  for (int i = 0; i < w->scan->num_components && reason == NULL; i++) {
    int c = w->scan->component[i], quant = w->jpeg->components[c].quant;
    pl_component_blocks *component = &w->coefficients->components[c];
    if (component->low[0] < 0) {
      if (!w->jpeg->has_quant[quant]) return "damaged (a table is missing)";
      memcpy(component->quant, w->jpeg->quant[quant], sizeof component->quant);
    }
    reason = note_bits(w->scan, component);
  }
  return reason == NULL ? build_tables(w) : reason;
}

/* ---- its MCUs ---------------------------------------------------------------------------------------------------- */

static void read_block(walk *w, int i, int x, int y) {
  const pl_component_blocks *component = &w->coefficients->components[w->scan->component[i]];
  w->reader.dc = &w->codes[2 * i];
  w->reader.ac = &w->codes[2 * i + 1];
  w->read_band(&w->reader, i, component->blocks + ((size_t)y * (size_t)component->across + (size_t)x) * 64);
}

static int up(int value, int unit) { return (value + unit - 1) / unit; }

/* Set how many MCUs the scan has in a row, and rows of them. That of one component is a block, without padding. */
static void scan_extent(const walk *w, int *across, int *down) {
  const pl_record *shape = w->shape;
  *across = shape->mcus_x;
  *down = shape->mcus_y;
  if (w->scan->num_components > 1) return;
  int c = w->scan->component[0];
  *across = up(up(shape->width * shape->hs[c], shape->hmax), 8);
  *down = up(up(shape->height * shape->vs[c], shape->vmax), 8);
}

static void read_mcu(walk *w, int x, int y) {
  if (w->scan->num_components == 1) {
    read_block(w, 0, x, y);
    return;
  }
  for (int i = 0; i < w->scan->num_components; i++) {
    int h = w->shape->hs[w->scan->component[i]], v = w->shape->vs[w->scan->component[i]];
    for (int block = 0; block < h * v; block++) read_block(w, i, x * h + block % h, y * v + block / h);
  }
}

static const char *read_interval(walk *w, int64_t first, int64_t num_mcus, int across) {
  size_t size = pl_jpeg_unstuff(w->jpeg, w->plain);
  memset(w->plain + size, 0, PL_TAIL_BYTES);
  w->reader = (pl_band_reader){.bits = pl_bits_at(w->plain, size, 0), .scan = w->scan};
  for (int64_t i = first; i < first + num_mcus; i++) {
    read_mcu(w, (int)(i % across), (int)(i / across));
    if (pl_bits_overran(&w->reader.bits)) return CUT_OFF;
    if (w->reader.wrong) return "damaged (bits that are no code)";
  }
  if (w->reader.run_of_ends > 0) return "damaged (bits that are no code)";
  return (uint64_t)size * 8 - pl_bits_position(&w->reader.bits) < 8 ? NULL : "damaged (bytes behind its last block)";
}

static const char *read_scan(walk *w) {
  const char *reason = begin_scan(w);
  if (reason != NULL) return reason;
  int across = 0, down = 0;
  scan_extent(w, &across, &down);
  w->read_band = w->jpeg->is_progressive ? pl_band_reader_for(w->scan) : pl_read_sequential;
  int64_t num_mcus = (int64_t)across * down;
  int64_t interval = w->jpeg->restart_interval == 0 ? num_mcus : w->jpeg->restart_interval;
  for (int64_t first = 0, number = 0; first < num_mcus && reason == NULL; first += interval, number++) {
    if (number > 0) reason = pl_jpeg_restart(w->jpeg, number - 1);
    int64_t n = num_mcus - first < interval ? num_mcus - first : interval;
    if (reason == NULL) reason = read_interval(w, first, n, across);
  }
  return reason;
}

/* ---- the file ---------------------------------------------------------------------------------------------------- */

static const char *reserve_memory(walk *w) {
  size_t num_blocks = 0, left = w->jpeg->size - w->jpeg->at;
  for (int c = 0; c < w->shape->components; c++) {
    pl_component_blocks *component = &w->coefficients->components[c];
    component->across = w->shape->mcus_x * w->shape->hs[c];
    component->down = w->shape->mcus_y * w->shape->vs[c];
    memset(component->low, -1, sizeof component->low);
    num_blocks += (size_t)component->across * (size_t)component->down;
  }
  // The DC of a block takes a bit at least; those of padding are left out where a scan has one component.
  if (num_blocks / 64 > left) return CUT_OFF;
  size_t codes_bytes = 6 * sizeof *w->codes;
  int16_t *blocks = pl_reserve(&w->scratch->coefficients, num_blocks * 64 * sizeof *blocks);
  uint8_t *memory = pl_reserve(&w->scratch->plain, codes_bytes + left + PL_TAIL_BYTES);
  if (blocks == NULL || memory == NULL) return "too large for this memory";
  memset(blocks, 0, num_blocks * 64 * sizeof *blocks);
  w->codes = (pl_codes *)(void *)memory;
  w->plain = memory + codes_bytes;
  for (int c = 0; c < w->shape->components; c++) {
    pl_component_blocks *component = &w->coefficients->components[c];
    component->blocks = blocks;
    blocks += (size_t)component->across * (size_t)component->down * 64;
  }
  return NULL;
}

static const char *read_scans(walk *w) {
  const char *reason = reserve_memory(w);
  bool is_end = false;
  for (int scans = 0; !is_end && reason == NULL; scans++) {
    if (scans == MAX_SCANS) return "of more than 100 scans";
    reason = read_scan(w);
    if (reason == NULL) reason = pl_jpeg_next_scan(w->jpeg, w->scan, &is_end);
  }
  for (int c = 0; c < w->shape->components && reason == NULL; c++) {
    for (int at = 0; at < 64; at++) {
      // Libjpeg smooths what it knows in part only.
      if (w->coefficients->components[c].low[at] != 0) return "progressive and not complete";
    }
  }
  return reason;
}

const char *pl_coefficients_read(pl_jpeg *jpeg, pl_scan *scan, const pl_record *shape, pl_scratch *scratch,
                                 pl_coefficients *coefficients) {
  walk w = {.jpeg = jpeg, .scan = scan, .shape = shape, .scratch = scratch, .coefficients = coefficients};
  memset(coefficients, 0, sizeof *coefficients);
  return read_scans(&w);
}
