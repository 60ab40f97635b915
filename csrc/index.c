/* Turns a JPEG file into a record: the same coefficients, with a seek point every few MCUs.
 *
 * The bits of a sequential file are copied. Only where it has restart markers, which set the DC predictors to zero,
 * the DC differences behind them are coded anew, with the file's own tables. Where those have no codes for them, and of
 * files of several scans, all coefficients are coded anew (transcode.c).
 */
#include <stdlib.h>
#include <string.h>

#include "block.h"
#include "jpeg.h"
#include "paceline.h"
#include "transcode.h"
#include "writer.h"

#define LARGEST_COEFFICIENT 8191 /* dequantized: eight times what 8-bit samples need, and far from any overflow */
#define RECODED_BYTES 16         /* more at most that an interval's recoded differences take: 3 of 27 bits */

static const char NO_MEMORY[] = "too large for this memory", NO_CODE[] = "divided by restart markers";

/* An image that is being indexed. */
typedef struct {
  pl_jpeg jpeg;
  pl_scan scan;
  pl_record shape;
  const uint16_t *quant[3];
  const uint8_t *tables[4]; /* dc0, ac0, dc1, ac1: what the record's numbers of tables mean */
  pl_code_set codes;
  pl_mcu mcu;
  int32_t dc[3]; /* predictors as a reader of the record has them, which knows no restarts */
  uint8_t *plain; /* the bytes of one restart interval, without stuffing */
  pl_writer writer;
} work;

/* ---- what the headers say ---------------------------------------------------------------------------------------- */

/* Return the record's number, 0 or 1, of a table; -1 where it would be a third. */
static int number_of(const uint8_t *tables[4], int kind, const uint8_t *table) {
  for (int i = 0; i < 2; i++) {
    const uint8_t **slot = &tables[2 * i + kind];
    if (*slot == NULL) *slot = table;
    if (*slot == table) return i;
  }
  return -1;
}

static const char *choose_tables(work *w) {
  for (int c = 0; c < w->shape.components; c++) {
    int dc = w->scan.dc_table[c], ac = w->scan.ac_table[c], quant = w->jpeg.components[c].quant;
    if (!w->jpeg.has_quant[quant] || !w->jpeg.has_dc[dc] || !w->jpeg.has_ac[ac]) return "damaged (a table is missing)";
    w->quant[c] = w->jpeg.quant[quant];
    w->shape.dc_table[c] = number_of(w->tables, 0, w->jpeg.dc[dc]);
    w->shape.ac_table[c] = number_of(w->tables, 1, w->jpeg.ac[ac]);
    if (w->shape.dc_table[c] < 0 || w->shape.ac_table[c] < 0) return "coded with three sets of Huffman tables";
  }
  pl_codes *codes[4] = {&w->codes.dc[0], &w->codes.ac[0], &w->codes.dc[1], &w->codes.ac[1]};
  for (int i = 0; i < 4; i++) {
    if (w->tables[i] != NULL && !pl_codes_build(codes[i], w->tables[i], i % 2 == 1)) {
      return "damaged (a Huffman table)";
    }
  }
  return NULL;
}

static const char *set_shape(work *w, int every) {
  pl_record *shape = &w->shape;
  shape->width = w->jpeg.width;
  shape->height = w->jpeg.height;
  shape->components = w->jpeg.num_components;
  shape->orientation = w->jpeg.orientation;
  shape->every = every;
  for (int c = 0; c < shape->components; c++) {
    int h = w->jpeg.components[c].h, v = w->jpeg.components[c].v;
    if (h < 1 || h > 4 || v < 1 || v > 4) return "damaged (its frame header)";
    shape->hs[c] = shape->components == 1 ? 1 : h;
    shape->vs[c] = shape->components == 1 ? 1 : v;
  }
  return pl_record_set_geometry(shape) ? NULL : "sampled in an unusual way";
}

/* Return whether the file is one sequential scan of all components, as a record is. */
static bool is_one_scan(const work *w) {
  return !w->jpeg.is_progressive && w->scan.num_components == w->jpeg.num_components && w->scan.first == 0 &&
         w->scan.last == 63 && w->scan.high == 0 && w->scan.low == 0;
}

/* ---- what the bits say ------------------------------------------------------------------------------------------- */

static const char *check_bits(const pl_cursor *cursor) {
  if (pl_bits_overran(&cursor->bits)) return "cut off";
  return pl_cursor_is_sound(cursor) ? NULL : "damaged (bits that are no code)";
}

static bool is_in_range(const int16_t *block, const uint16_t *quant) {
  int32_t largest = 0;
  for (int i = 0; i < 64; i++) {
    int32_t value = block[i] * (int32_t)quant[i];
    value = value < 0 ? -value : value;
    largest = value > largest ? value : largest;
  }
  return largest <= LARGEST_COEFFICIENT;
}

static const char *read_block(const work *w, pl_cursor *cursor, const pl_mcu_block *how) {
  int16_t block[64] = {0};
  pl_read_block(cursor, how, block);
  return is_in_range(block, w->quant[how->component]) ? NULL : "damaged (coefficients no image has)";
}

/* Write the difference between a component's DC and the one before the restart. */
static const char *recode_dc(work *w, int component, int32_t dc) {
  int32_t difference = dc - w->dc[component];
  uint32_t size = pl_bits_of(difference), code = 0;
  int length = 0;
  if (size <= PL_MAX_DC_SIZE) {
    length = pl_code_of(w->tables[2 * w->shape.dc_table[component]], (uint8_t)size, &code);
  }
  if (length == 0) return NO_CODE;
  pl_writer_put(&w->writer, code, (uint32_t)length);
  pl_writer_put(&w->writer, (uint32_t)(difference < 0 ? difference - 1 : difference), size);
  return NULL;
}

/* Read and write the first MCU behind a restart: of each component the first block's DC is coded anew. */
static const char *restart(work *w, pl_cursor *cursor) {
  bool is_first[3] = {true, true, true};
  for (int i = 0; i < w->mcu.num_blocks; i++) {
    const pl_mcu_block *how = &w->mcu.blocks[i];
    uint64_t from = pl_bits_position(&cursor->bits);
    pl_cursor at_dc = *cursor;
    const char *reason = read_block(w, cursor, how);
    if (reason == NULL) reason = check_bits(cursor);
    if (is_first[how->component] && w->dc[how->component] != 0 && reason == NULL) {
      pl_read_dc(&at_dc.bits, how->dc, &at_dc.dc[how->component], true);
      from = pl_bits_position(&at_dc.bits);
      reason = recode_dc(w, how->component, at_dc.dc[how->component]);
    }
    if (reason != NULL) return reason;
    is_first[how->component] = false;
    pl_writer_copy(&w->writer, cursor->bits.bytes, from, pl_bits_position(&cursor->bits));
  }
  return NULL;
}

/* Index the `num_mcus` MCUs from `first` on, whose bytes lie in `plain`. */
static const char *index_interval(work *w, size_t size, int64_t first, int64_t num_mcus) {
  pl_cursor cursor = {.bits = pl_bits_at(w->plain, size, 0)};
  uint64_t copied = 0; // bits of `plain` that are written; those behind it follow at the interval's end
  const char *reason = NULL;
  for (int64_t i = first; i < first + num_mcus && reason == NULL; i++) {
    const int32_t *dc = i == first ? w->dc : cursor.dc;
    uint64_t position = pl_writer_position(&w->writer) + pl_bits_position(&cursor.bits) - copied;
    if (i % w->shape.mcus_x % w->shape.every == 0) pl_writer_point(&w->writer, position, dc);
    if (i == first) {
      reason = restart(w, &cursor);
      copied = pl_bits_position(&cursor.bits);
      continue;
    }
    for (int b = 0; b < w->mcu.num_blocks && reason == NULL; b++) reason = read_block(w, &cursor, &w->mcu.blocks[b]);
    if (reason == NULL) reason = check_bits(&cursor);
  }
  if (reason != NULL) return reason;
  uint64_t end = pl_bits_position(&cursor.bits);
  if ((uint64_t)size * 8 - end >= 8) return "damaged (bytes behind its last block)";
  pl_writer_copy(&w->writer, w->plain, copied, end);
  memcpy(w->dc, cursor.dc, sizeof w->dc);
  return NULL;
}

static const char *index_scan(work *w) {
  int64_t num_mcus = (int64_t)w->shape.mcus_x * w->shape.mcus_y;
  int64_t interval = w->jpeg.restart_interval == 0 ? num_mcus : w->jpeg.restart_interval;
  size_t left = w->jpeg.size - w->jpeg.at;
  size_t max_scan_bytes = left + (size_t)((num_mcus + interval - 1) / interval) * RECODED_BYTES;
  if (max_scan_bytes > UINT32_MAX / 8) return "too large";
  w->plain = malloc(left + PL_TAIL_BYTES);
  if (w->plain == NULL || !pl_writer_open(&w->writer, &w->shape, w->quant, w->tables, max_scan_bytes)) {
    return NO_MEMORY;
  }
  for (int64_t first = 0, number = 0; first < num_mcus; first += interval, number++) {
    const char *reason = number > 0 ? pl_jpeg_restart(&w->jpeg, number - 1) : NULL;
    if (reason != NULL) return reason;
    size_t size = pl_jpeg_unstuff(&w->jpeg, w->plain);
    memset(w->plain + size, 0, PL_TAIL_BYTES);
    reason = index_interval(w, size, first, num_mcus - first < interval ? num_mcus - first : interval);
    if (reason != NULL) return reason;
  }
  return NULL;
}

/* ---- all of it --------------------------------------------------------------------------------------------------- */

/* Index a file of one scan by copying its bits. */
static const char *copy_scan(work *w) {
  const char *reason = choose_tables(w);
  if (reason != NULL) return reason;
  pl_mcu_layout(&w->shape, &w->codes, &w->mcu);
  reason = index_scan(w);
  if (reason != NULL) return reason;
  bool is_end = false;
  reason = pl_jpeg_next_scan(&w->jpeg, &w->scan, &is_end);
  return reason == NULL && !is_end ? "damaged (a scan too many)" : reason;
}

static const char *index_file(work *w, const uint8_t *file, size_t size, int every) {
  const char *reason = pl_jpeg_open(file, size, &w->jpeg, &w->scan);
  if (reason == NULL) reason = set_shape(w, every);
  if (reason != NULL) return reason;
  size_t scan_at = w->jpeg.at;
  if (is_one_scan(w)) {
    reason = copy_scan(w);
    if (reason != NO_CODE) return reason;
    free(w->writer.data);
    w->writer.data = NULL;
    w->jpeg.at = scan_at;
  }
  return pl_transcode(&w->jpeg, &w->scan, &w->shape, &w->writer);
}

const char *pl_index_jpeg(const uint8_t *file, size_t size, int every, uint8_t **out, size_t *out_size) {
  if (every < 1 || every > 255) return "indexed with a seek point every 1 to 255 MCUs only";
  work *w = calloc(1, sizeof *w);
  if (w == NULL) return NO_MEMORY;
  const char *reason = index_file(w, file, size, every);
  if (reason == NULL) {
    *out = pl_writer_close(&w->writer, out_size);
  } else {
    free(w->writer.data);
  }
  free(w->plain);
  free(w);
  return reason;
}
