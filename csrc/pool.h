/* Native threads that decode batches of crops: claimed in order of submission, waited for with a time limit.
 *
 * A task is a batch. Its images are claimed one by one, and those of an older task before those of a newer one, so that
 * batches come out in order whatever the images cost. No function here touches Python, and none may be called with a
 * pool of another process: after a fork the child has the memory and no threads, so `pl_pool_is_mine` is asked first.
 */
#ifndef PACELINE_POOL_H
#define PACELINE_POOL_H

#include <stdbool.h>

#include "files.h"

#define PL_MAX_THREADS 1024

/* What a thread keeps between images at most; a larger image's memory is given back, so that one panorama in a million
 * photographs does not stay in every thread. An image of 12 megapixels decoded whole needs about this. */
#define PL_KEPT_BYTES ((size_t)64 << 20)

typedef struct pl_pool pl_pool;
typedef struct pl_task pl_task;

/* One image of a batch. Without a path and without bytes its output and its status are left alone. */
typedef struct {
  pl_file file; /* a record's bytes, too */
  pl_box box;
  int flip;
} pl_image;

typedef enum { PL_RECORDS, PL_FILES, PL_HEADERS } pl_kind; /* crops of records, crops of JPEG files, or files' sizes */

/* What is done with the `n` images of a batch, and where it goes. */
typedef struct {
  pl_kind kind;
  pl_crop crop;
  uint8_t *out;    /* [n, channels, size, size] */
  int32_t *sizes;  /* [n, 2], of files and headers: height and width, upright */
  int32_t *status; /* [n], of `pl_status` */
} pl_batch;

/* Start `num_threads` threads, 1 to PL_MAX_THREADS. Return NULL and say why in `*error` (an errno). */
pl_pool *pl_pool_new(int num_threads, int *error);

/* Leave out what has not begun, wait for the images under way, and join the threads. May be called again. Return false
 * where a thread hangs, as one does whose disk does not answer: it ends when it can, and until then the pool and what
 * its images lie in must stand. */
bool pl_pool_close(pl_pool *pool);

/* Free a closed pool all of whose tasks are freed. */
void pl_pool_free(pl_pool *pool);

/* Return whether this process made the pool, and not one that forked it. */
bool pl_pool_is_mine(const pl_pool *pool);

/* Return the bytes that the threads keep from image to image. */
size_t pl_pool_scratch_bytes(pl_pool *pool);

/* Queue a batch of `n` images; the task owns `images`, which came from malloc. What the images and `batch` point to
 * must stand until the task is done or freed. Return NULL where the pool is closed, or there is no memory: `images` is
 * the caller's then. */
pl_task *pl_pool_submit(pl_pool *pool, pl_image *images, size_t n, const pl_batch *batch);

typedef enum { PL_RUNNING = 0, PL_DONE = 1, PL_DROPPED = 2 } pl_task_state;

/* Wait at most `timeout_ns` for a task, and return what it has come to. Several threads may wait for one. */
pl_task_state pl_task_wait(pl_task *task, int64_t timeout_ns);

/* Return the nanoseconds that the threads have spent on a task so far, all of them together. */
int64_t pl_task_busy_ns(pl_task *task);

/* Return the number of images of a task. */
size_t pl_task_size(const pl_task *task);

/* Return the index entry that was made of image `i` of a task that is done. It stands until the task is freed. */
pl_entry pl_task_entry(const pl_task *task, size_t i);

/* Leave out what has not begun, wait for the images under way, and free the task. Return false where one hangs: then
 * the task is not freed, and what its images lie in must stand. */
bool pl_task_free(pl_task *task);

/* Free a task in a process that has forked: it waits for nobody. */
void pl_task_forget(pl_task *task);

#endif
