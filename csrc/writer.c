/* Lays a record out as its header is known, and adds points and bits as they come. */
#include "writer.h"

#include <string.h>

#include "bytes.h"
#include "huffman.h"

static size_t tables_bytes(const uint8_t *const tables[4]) {
  size_t size = 0;
  for (int i = 0; i < 4; i++) size += tables[i] == NULL ? 0 : pl_table_extent(tables[i], 16 + 256);
  return size;
}

static void write_header(uint8_t *data, const pl_record *shape) {
  memcpy(data, PL_MAGIC, 4);
  pl_put_little16(data + 4, (uint32_t)shape->width);
  pl_put_little16(data + 6, (uint32_t)shape->height);
  data[8] = (uint8_t)shape->components;
  data[9] = (uint8_t)shape->orientation;
  data[10] = (uint8_t)shape->every;
  for (int c = 0; c < shape->components; c++) {
    data[12 + c] = (uint8_t)(shape->hs[c] << 4 | shape->vs[c]);
    data[15 + c] = (uint8_t)(shape->dc_table[c] << 4 | shape->ac_table[c]);
  }
  pl_put_little32(data + 20, (uint32_t)(shape->mcus_y * shape->points_x));
}

bool pl_writer_open(pl_writer *writer, pl_buffer *buffer, const pl_record *shape, const uint16_t *const quant[3],
                    const uint8_t *const tables[4], size_t max_scan_bytes) {
  size_t huffman_bytes = tables_bytes(tables), num_points = (size_t)shape->mcus_y * (size_t)shape->points_x;
  size_t at = PL_HEADER_BYTES + 128 * (size_t)shape->components;
  memset(writer, 0, sizeof *writer);
  writer->point_at = (size_t)pl_round_up4(at + huffman_bytes);
  writer->points_end = writer->point_at + num_points * PL_POINT_BYTES;
  writer->bits_at = writer->at = (size_t)pl_round_up4(writer->points_end);
  uint8_t *memory = pl_reserve(buffer, PL_ENTRY_BYTES + writer->bits_at + max_scan_bytes + PL_TAIL_BYTES);
  if (memory == NULL) return false;
  uint8_t *data = writer->data = memory + PL_ENTRY_BYTES;
  memset(data, 0, writer->bits_at);
  write_header(data, shape);
  pl_put_little32(data + 28, (uint32_t)huffman_bytes);
  for (int c = 0; c < shape->components; c++) {
    for (int i = 0; i < 64; i++) pl_put_little16(data + PL_HEADER_BYTES + 128 * c + 2 * i, quant[c][i]);
  }
  for (int i = 0; i < 4; i++) {
    if (tables[i] == NULL) continue;
    size_t extent = pl_table_extent(tables[i], 16 + 256);
    memcpy(data + at, tables[i], extent);
    data[18] = (uint8_t)(data[18] | 1 << i);
    at += extent;
  }
  return true;
}

void pl_writer_point(pl_writer *writer, uint64_t position, const int32_t dc[3]) {
  uint8_t *point = writer->data + writer->point_at;
  pl_put_little32(point, (uint32_t)position);
  for (int c = 0; c < 3; c++) pl_put_little16(point + 4 + 2 * c, (uint32_t)dc[c]);
  writer->point_at += PL_POINT_BYTES;
}

uint64_t pl_writer_position(const pl_writer *writer) {
  return (uint64_t)(writer->at - writer->bits_at) * 8 + writer->num_held;
}

void pl_writer_put(pl_writer *writer, uint32_t value, uint32_t n) {
  writer->held = writer->held << n | (value & (uint32_t)(((uint64_t)1 << n) - 1));
  writer->num_held += n;
  while (writer->num_held >= 8) {
    writer->num_held -= 8;
    writer->data[writer->at++] = (uint8_t)(writer->held >> writer->num_held);
  }
}

void pl_writer_copy(pl_writer *writer, const uint8_t *bytes, uint64_t from, uint64_t to) {
  if (writer->num_held == 0 && from % 8 == 0) {
    size_t whole = (size_t)((to - from) / 8);
    memcpy(writer->data + writer->at, bytes + from / 8, whole);
    writer->at += whole;
    from += (uint64_t)whole * 8;
  }
  while (from < to) {
    uint32_t n = to - from < 32 ? (uint32_t)(to - from) : 32;
    uint64_t window = pl_big64(bytes + from / 8) << from % 8;
    pl_writer_put(writer, (uint32_t)(window >> (64 - n)), n);
    from += n;
  }
}

void pl_writer_tables(const pl_writer *writer, pl_record *record) {
  record->huffman = writer->data + PL_HEADER_BYTES + 128 * (size_t)record->components;
  record->huffman_bytes = pl_little32(writer->data + 28);
  record->huffman_mask = writer->data[18];
}

uint8_t *pl_writer_next(pl_writer *writer) { return writer->data + writer->at; }

void pl_writer_take(pl_writer *writer, uint64_t num_bits) {
  writer->at += (size_t)(num_bits / 8);
  writer->num_held = (uint32_t)(num_bits % 8);
  if (writer->num_held > 0) writer->held = (uint64_t)writer->data[writer->at] >> (8 - writer->num_held);
}

size_t pl_writer_close(pl_writer *writer) {
  if (writer->num_held > 0) pl_writer_put(writer, 0xff, 8 - writer->num_held);
  pl_put_little32(writer->data + 24, (uint32_t)(writer->at - writer->bits_at));
  memset(writer->data + writer->at, 0, PL_TAIL_BYTES);
  return writer->at + PL_TAIL_BYTES;
}
