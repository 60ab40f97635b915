/* Stress the pool under ThreadSanitizer: stress_pool SECONDS FILE..., of records and JPEG files.
 *
 * Pools of 1 to 4 threads, each with several threads that submit batches and wait for them, a little or to the end, or
 * free them at once; every third pool is closed while they do. A batch is of records, of JPEG files in memory and at
 * paths, or of their sizes. Each that is done must hold what the same images give alone. A race is ThreadSanitizer's to
 * report; a difference aborts.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../pool.h"
#include "check.h"

#define SIZE 24
#define MAX_FILES 64
#define MAX_BYTES (1 << 16)
#define NUM_SUBMITTERS 3
#define NUM_BATCHES 200
#define IMAGE_BYTES ((size_t)3 * SIZE * SIZE)

typedef struct {
  const char *path;
  uint8_t *data;
  size_t size; /* without the parameters of the fuzzers, which follow at the path too */
  pl_box box;
  uint8_t *pixels; /* as decoded alone */
} file;

typedef struct {
  file all[MAX_FILES];
  size_t n;
} group;

typedef struct {
  pl_pool *pool;
  uint32_t seed;
  size_t num_done, num_dropped, num_freed; /* freed while it was under way, or not begun */
} submitter;

static group records, jpegs;

static uint32_t next(uint32_t *seed) { return (*seed = *seed * 1664525u + 1013904223u) >> 8; }

static void *needed(void *memory) {
  if (memory == NULL) exit(2);
  return memory;
}

/* Keep a file that can be decoded, in its group. */
static void read_file(const char *path) {
  uint8_t *data = needed(malloc(MAX_BYTES));
  FILE *opened = needed(fopen(path, "rb"));
  size_t size = fread(data, 1, MAX_BYTES, opened);
  fclose(opened);
  if (size <= NUM_PARAMETERS) return;
  file it = {.path = path, .data = data, .size = size - NUM_PARAMETERS, .pixels = needed(malloc(IMAGE_BYTES))};
  pl_scratch *scratch = needed(pl_scratch_new());
  pl_record record;
  pl_indexed indexed;
  pl_status status = pl_record_open(it.data, it.size, &record);
  group *of = &records;
  if (status != PL_OK && pl_index_jpeg(it.data, it.size, PL_FILE_EVERY, scratch, &indexed) == NULL) {
    status = pl_record_open(indexed.record, indexed.size, &record);
    of = &jpegs;
  }
  int is_lying = record.orientation >= 5;
  it.box = (pl_box){0, 0, is_lying ? record.width : record.height, is_lying ? record.height : record.width};
  if (status == PL_OK) status = pl_decode_crop(&record, it.box, 1, 0, SIZE, 3, PL_ALL, scratch, it.pixels);
  if (status == PL_OK && of->n < MAX_FILES) of->all[of->n++] = it;
  pl_scratch_free(scratch);
}

static void check(const pl_batch *batch, const file *const *which, size_t n, const int32_t *sizes) {
  for (size_t i = 0; i < n; i++) {
    const pl_box *box = &which[i]->box;
    bool is_same = batch->kind == PL_HEADERS
                       ? sizes[2 * i] == (int32_t)box->height && sizes[2 * i + 1] == (int32_t)box->width
                       : memcmp(batch->out + i * IMAGE_BYTES, which[i]->pixels, IMAGE_BYTES) == 0;
    if (batch->status[i] == PL_OK && is_same) continue;
    fprintf(stderr, "image %zu of a batch: status %d, or other pixels\n", i, batch->status[i]);
    abort();
  }
}

static pl_file place(const file *one, pl_kind kind, uint32_t random) {
  if (kind == PL_RECORDS || random % 2 == 0) return (pl_file){.bytes = one->data, .num_bytes = one->size};
  return (pl_file){.path = strcpy(needed(malloc(strlen(one->path) + 1)), one->path), .num_bytes = one->size};
}

/* Submit one batch and see it through; return whether the pool still took it. */
static bool submit(submitter *self) {
  static const pl_kind kinds[] = {PL_RECORDS, PL_FILES, PL_FILES, PL_HEADERS};
  pl_kind kind = jpegs.n > 0 ? kinds[next(&self->seed) % 4] : PL_RECORDS;
  const group *from = kind == PL_RECORDS ? &records : &jpegs;
  const file *which[16];
  char *paths[16] = {NULL};
  int32_t sizes[32];
  size_t n = next(&self->seed) % 16;
  pl_image *images = needed(calloc(n + 1, sizeof *images));
  uint8_t *out = needed(malloc((n + 1) * IMAGE_BYTES));
  int32_t *status = needed(malloc((n + 1) * sizeof *status));
  for (size_t i = 0; i < n; i++) {
    const file *one = which[i] = &from->all[next(&self->seed) % from->n];
    images[i] = (pl_image){.file = place(one, kind, next(&self->seed)), .box = one->box};
    paths[i] = (char *)images[i].file.path;
    sizes[2 * i] = (int32_t)one->box.height, sizes[2 * i + 1] = (int32_t)one->box.width;
  }
  pl_batch batch = {.kind = kind,
                    .crop = {.inside = 1, .size = SIZE, .channels = 3, .stage = PL_ALL},
                    .out = out,
                    .sizes = sizes,
                    .status = status};
  pl_task *task = pl_pool_submit(self->pool, images, n, &batch);
  if (task == NULL) free(images);
  if (task != NULL) {
    uint32_t patience = next(&self->seed) % 3;
    pl_task_state now = pl_task_wait(task, patience == 0 ? 0 : 50000);
    while (patience == 2 && now == PL_RUNNING) now = pl_task_wait(task, 1000000);
    (void)pl_task_busy_ns(task);
    (void)pl_pool_scratch_bytes(self->pool);
    if (now == PL_DONE) check(&batch, which, n, sizes);
    self->num_done += now == PL_DONE, self->num_dropped += now == PL_DROPPED, self->num_freed += now == PL_RUNNING;
    if (!pl_task_free(task)) abort(); /* nothing here takes two seconds */
  }
  for (size_t i = 0; i < n; i++) free(paths[i]); /* nobody may look at one once its task is gone */
  free(out);
  free(status);
  return task != NULL;
}

static void *run(void *argument) {
  submitter *self = argument;
  for (int i = 0; i < NUM_BATCHES && submit(self);) i++;
  return NULL;
}

int main(int argc, char **argv) {
  for (int i = 2; i < argc; i++) read_file(argv[i]);
  if (records.n == 0) {
    fprintf(stderr, "usage: %s SECONDS FILE...\n", argv[0]);
    return 2;
  }
  size_t num_done = 0, num_dropped = 0, num_freed = 0;
  uint32_t number = 0;
  for (time_t end = time(NULL) + atol(argv[1]); time(NULL) < end; number++) {
    int error;
    pl_pool *pool = needed(pl_pool_new(1 + (int)(number % 4), &error));
    submitter all[NUM_SUBMITTERS];
    pthread_t threads[NUM_SUBMITTERS];
    for (uint32_t i = 0; i < NUM_SUBMITTERS; i++) {
      all[i] = (submitter){.pool = pool, .seed = number * NUM_SUBMITTERS + i};
      if (pthread_create(&threads[i], NULL, run, &all[i])) return 2;
    }
    if (number % 3 == 0) {
      usleep(1000 * (number % 10));
      (void)pl_pool_close(pool);
    }
    for (int i = 0; i < NUM_SUBMITTERS; i++) {
      pthread_join(threads[i], NULL);
      num_done += all[i].num_done, num_dropped += all[i].num_dropped, num_freed += all[i].num_freed;
    }
    if (!pl_pool_close(pool)) abort();
    pl_pool_free(pool);
  }
  printf("%u pools: %zu batches done, %zu dropped, %zu freed early\n", number, num_done, num_dropped, num_freed);
  return 0;
}
