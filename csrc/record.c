/* Reads the header of a record and checks it: after this every table, seek point and byte of bits lies inside. What
 * the seek points and bits say is checked where they are used. The layout: docs/reference/indexed-jpeg.md. */
#include "record.h"

#include <string.h>

#include "bytes.h"
#include "huffman.h"

const char *pl_reason(pl_status status) {
  switch (status) {
    case PL_OK: return "it is sound";
    case PL_NOT_A_RECORD: return "it is no indexed JPEG, or its header is damaged";
    case PL_BAD_TABLES: return "its Huffman tables are damaged";
    case PL_BAD_POINTS: return "its seek points are damaged";
    case PL_BAD_BITS: return "its bits are damaged";
    case PL_BAD_REGION: return "the region asked for lies outside it, or the output is too large";
    case PL_TOO_LARGE: return "it is larger than 128,000,000 pixels";
    case PL_NO_MEMORY: return "there is not enough memory for it";
    case PL_UNREADABLE: return "its bytes cannot be read: the file was cut, or the disk fails";
    case PL_RESIZED: return "it has another size than before";
    case PL_NOT_INDEXABLE: return "it is no JPEG file that the native core decodes";
  }
  return "unknown status";
}

static bool is_factor(int factor) { return factor == 1 || factor == 2 || factor == 4; }

bool pl_record_set_geometry(pl_record *record) {
  int num_blocks = 0;
  record->hmax = record->vmax = 1;
  for (int c = 0; c < record->components; c++) {
    int h = record->hs[c], v = record->vs[c];
    if (!is_factor(h) || !is_factor(v)) return false;
    if (h > record->hmax) record->hmax = h;
    if (v > record->vmax) record->vmax = v;
    num_blocks += h * v;
  }
  // One component alone is not interleaved, whatever its factors: an MCU is a block.
  if (num_blocks > PL_MAX_MCU_BLOCKS || (record->components == 1 && num_blocks != 1)) return false;
  record->mcus_x = (record->width + 8 * record->hmax - 1) / (8 * record->hmax);
  record->mcus_y = (record->height + 8 * record->vmax - 1) / (8 * record->vmax);
  record->points_x = (record->mcus_x + record->every - 1) / record->every;
  return true;
}

static bool read_header(const uint8_t *data, pl_record *record) {
  record->width = (int)pl_little16(data + 4);
  record->height = (int)pl_little16(data + 6);
  record->components = data[8];
  record->orientation = data[9];
  record->every = data[10];
  record->huffman_mask = data[18];
  if (data[11] != 0 || data[19] != 0) return false; // a later version may use them
  if (record->width == 0 || record->height == 0 || record->every == 0) return false;
  if (record->components != 1 && record->components != 3) return false;
  if (record->orientation < 1 || record->orientation > 8 || record->huffman_mask > 15) return false;
  for (int c = 0; c < record->components; c++) {
    record->hs[c] = data[12 + c] >> 4;
    record->vs[c] = data[12 + c] & 15;
    record->dc_table[c] = data[15 + c] >> 4;
    record->ac_table[c] = data[15 + c] & 15;
    if (record->dc_table[c] > 1 || record->ac_table[c] > 1) return false;
    int needed = 1 << (2 * record->dc_table[c]) | 2 << (2 * record->ac_table[c]);
    if ((record->huffman_mask & needed) != needed) return false;
  }
  return pl_record_set_geometry(record);
}

static bool tables_fit(const pl_record *record) {
  const uint8_t *table = record->huffman;
  size_t left = record->huffman_bytes;
  for (int mask = record->huffman_mask; mask != 0; mask >>= 1) {
    if ((mask & 1) == 0) continue;
    size_t extent = pl_table_extent(table, left);
    if (extent == 0) return false;
    table += extent;
    left -= extent;
  }
  return left == 0;
}

/* Return whether so few bits can be this image: a block has two codes, of a bit at least. Without this a record of
 * some bytes could ask for the memory of PL_MAX_PIXELS. */
static bool has_bits_enough(const pl_record *record) {
  uint64_t blocks = 0;
  for (int c = 0; c < record->components; c++) blocks += (uint64_t)(record->hs[c] * record->vs[c]);
  blocks *= (uint64_t)record->mcus_x * (uint64_t)record->mcus_y;
  return (uint64_t)record->scan_bytes * 8 >= blocks * 2;
}

pl_status pl_record_open(const uint8_t *data, size_t size, pl_record *record) {
  memset(record, 0, sizeof *record);
  if (size < PL_HEADER_BYTES || memcmp(data, PL_MAGIC, 4) != 0) return PL_NOT_A_RECORD;
  if (!read_header(data, record)) return PL_NOT_A_RECORD;
  if ((int64_t)record->width * record->height > PL_MAX_PIXELS) return PL_TOO_LARGE;
  uint64_t num_points = pl_little32(data + 20), scan_bytes = pl_little32(data + 24), tables = pl_little32(data + 28);
  if (num_points != (uint64_t)record->mcus_y * (uint64_t)record->points_x) return PL_NOT_A_RECORD;
  // Each of these is below 2^36, so 64 bits hold their sum.
  uint64_t huffman_at = PL_HEADER_BYTES + (uint64_t)record->components * 128;
  uint64_t points_at = pl_round_up4(huffman_at + tables);
  uint64_t bits_at = pl_round_up4(points_at + num_points * PL_POINT_BYTES);
  if (bits_at + scan_bytes + PL_TAIL_BYTES != size) return PL_NOT_A_RECORD;
  record->quant = data + PL_HEADER_BYTES;
  record->huffman = data + huffman_at;
  record->huffman_bytes = (size_t)tables;
  record->points = data + points_at;
  record->bits = data + bits_at;
  record->scan_bytes = (size_t)scan_bytes;
  return tables_fit(record) && has_bits_enough(record) ? PL_OK : PL_NOT_A_RECORD;
}
