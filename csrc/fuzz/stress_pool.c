/* Stress the pool under ThreadSanitizer: stress_pool SECONDS RECORD...
 *
 * Pools of 1 to 4 threads, each with several threads that submit batches and wait for them, a little or to the end, or
 * free them at once; every third pool is closed while they do. Each batch that is done must hold what the first one of
 * the same image held. A race is ThreadSanitizer's to report; a difference aborts.
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
  uint8_t *data;
  size_t size;
  pl_box box;
  uint8_t *pixels; /* as decoded alone; NULL where it cannot be */
} file;

typedef struct {
  pl_pool *pool;
  uint32_t seed;
  size_t num_done, num_dropped, num_freed; /* freed while it was under way, or not begun */
} submitter;

static file files[MAX_FILES];
static size_t num_files;

static uint32_t next(uint32_t *seed) { return (*seed = *seed * 1664525u + 1013904223u) >> 8; }

static void *needed(void *memory) {
  if (memory == NULL) exit(2);
  return memory;
}

static void read_file(const char *path) {
  file *it = &files[num_files];
  FILE *opened = needed(fopen(path, "rb"));
  it->data = needed(malloc(MAX_BYTES));
  it->size = fread(it->data, 1, MAX_BYTES, opened);
  fclose(opened);
  pl_record record;
  if (it->size <= NUM_PARAMETERS || pl_record_open(it->data, it->size -= NUM_PARAMETERS, &record) != PL_OK) return;
  int is_lying = record.orientation >= 5;
  it->box = (pl_box){0, 0, is_lying ? record.width : record.height, is_lying ? record.height : record.width};
  it->pixels = needed(malloc(IMAGE_BYTES));
  pl_scratch *scratch = needed(pl_scratch_new());
  if (pl_decode_crop(&record, it->box, 1, 0, SIZE, 3, PL_ALL, scratch, it->pixels) == PL_OK) num_files++;
  pl_scratch_free(scratch);
}

static void check(const size_t *which, size_t n, const uint8_t *out, const int32_t *status) {
  for (size_t i = 0; i < n; i++) {
    if (status[i] == PL_OK && memcmp(out + i * IMAGE_BYTES, files[which[i]].pixels, IMAGE_BYTES) == 0) continue;
    fprintf(stderr, "image %zu of a batch: status %d, or other pixels\n", i, status[i]);
    abort();
  }
}

/* Submit one batch and see it through; return whether the pool still took it. */
static bool submit(submitter *self) {
  size_t which[16], n = next(&self->seed) % 16;
  pl_image *images = needed(calloc(n + 1, sizeof *images));
  uint8_t *out = needed(malloc((n + 1) * IMAGE_BYTES));
  int32_t *status = needed(malloc((n + 1) * sizeof *status));
  for (size_t i = 0; i < n; i++) {
    const file *one = &files[which[i] = next(&self->seed) % num_files];
    images[i] = (pl_image){.file = {.bytes = one->data, .num_bytes = one->size}, .box = one->box};
  }
  pl_batch batch = {.kind = PL_RECORDS,
                    .crop = {.inside = 1, .size = SIZE, .channels = 3, .stage = PL_ALL},
                    .out = out,
                    .status = status};
  pl_task *task = pl_pool_submit(self->pool, images, n, &batch);
  if (task == NULL) free(images);
  if (task != NULL) {
    uint32_t patience = next(&self->seed) % 3;
    pl_task_state now = pl_task_wait(task, patience == 0 ? 0 : 50000);
    while (patience == 2 && now == PL_RUNNING) now = pl_task_wait(task, 1000000);
    (void)pl_task_busy_ns(task);
    (void)pl_pool_scratch_bytes(self->pool);
    if (now == PL_DONE) check(which, n, out, status);
    self->num_done += now == PL_DONE, self->num_dropped += now == PL_DROPPED, self->num_freed += now == PL_RUNNING;
    if (!pl_task_free(task)) abort(); /* nothing here takes two seconds */
  }
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
  for (int i = 2; i < argc && num_files < MAX_FILES; i++) read_file(argv[i]);
  if (num_files == 0) {
    fprintf(stderr, "usage: %s SECONDS RECORD...\n", argv[0]);
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
