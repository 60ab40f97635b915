/* The pool of threads: one lock, one queue of tasks that have images left to claim.
 *
 * A claim takes the lock for tens of nanoseconds, and an image takes half a millisecond and more, so nothing finer is
 * needed: 16 threads ask for it some 60,000 times a second.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include "pool.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "reading.h"

/* The kernel is asked to read this many images beyond the ones that are made, and so many at once. The threads ask, not
 * who submits: for 110 kB that takes 2 us where they are in memory, and 60 to 90 us where they must be read. From a
 * cold disk, mapped for random access, two threads made 130 to 270 photographs a second without it, and with it 1,300
 * to 2,200, as many as from memory (measured on two busy cores, 2,000 photographs in random order). */
#define AHEAD 64
#define BURST 8

/* How long threads are waited for that are to leave off: far longer than any image takes, unless its disk hangs. */
#define PATIENCE_NS 2000000000

typedef struct {
  pl_pool *pool;
  pl_scratch *scratch;  /* the thread's own */
  size_t scratch_bytes; /* of it after the last image; under the pool's lock */
  pthread_t thread;
} worker;

struct pl_pool {
  pthread_mutex_t lock;
  pthread_cond_t work, ended;
  pl_task *first, *last; /* tasks with images that nobody has claimed */
  size_t num_ahead;      /* images that the kernel was asked to read, and nobody has claimed */
  bool is_closing, is_joined;
  pid_t pid;
  int num_threads, num_alive;
  worker workers[];
};

struct pl_task {
  pl_pool *pool;
  pl_task *follower; /* in the queue */
  pl_image *images;
  size_t n, claimed, under_way, asked; /* `asked` >= `claimed`: up to there the kernel was asked to read */
  pl_batch batch;
  pl_entry *entries; /* [n] of a batch of files, else NULL */
  int64_t busy_ns;
  bool is_dropped;
  pthread_cond_t done;
};

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* None of these can fail with glibc or musl, given room. */
static void new_condition(pthread_cond_t *condition) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); /* time limits hold when somebody sets the clock */
  pthread_cond_init(condition, &attributes);
  pthread_condattr_destroy(&attributes);
}

static struct timespec after(int64_t timeout_ns) {
  int64_t until_ns = now_ns() + timeout_ns;
  return (struct timespec){.tv_sec = (time_t)(until_ns / 1000000000), .tv_nsec = (long)(until_ns % 1000000000)};
}

/* Take a task out of the queue. The lock is held. */
static void take_out(pl_pool *pool, pl_task *task) {
  pl_task *before = NULL;
  for (pl_task *each = pool->first; each != NULL; before = each, each = each->follower) {
    if (each != task) continue;
    *(before != NULL ? &before->follower : &pool->first) = task->follower;
    if (pool->last == task) pool->last = before;
    return;
  }
}

/* ---- what is read ahead ---------------------------------------------------------------------------------------- */

/* A file to be read ahead. Its path is a copy, as its task may be freed meanwhile; memory is not touched. */
typedef struct {
  pl_file file;
  char path[PATH_MAX];
} ahead;

static void copy_file(ahead *to, const pl_file *file) {
  to->file = *file;
  if (file->path == NULL) return;
  size_t path_bytes = strnlen(file->path, sizeof to->path - 1);
  memcpy(to->path, file->path, path_bytes);
  to->path[path_bytes] = '\0'; /* longer ones are none, and nothing will be found there */
  to->file.path = to->path;
}

/* Choose the next images to be read ahead, at most BURST, and return how many. The lock is held. */
static size_t choose_ahead(pl_pool *pool, ahead chosen[BURST]) {
  size_t num_chosen = 0;
  for (pl_task *task = pool->first; task != NULL; task = task->follower)
    while (task->asked < task->n) {
      if (num_chosen == BURST || pool->num_ahead == AHEAD) return num_chosen;
      copy_file(&chosen[num_chosen++], &task->images[task->asked++].file);
      pool->num_ahead++;
    }
  return num_chosen;
}

static void read_ahead(const ahead *chosen) {
  const pl_file *file = &chosen->file;
  if (file->path != NULL)
    pl_read_file_ahead(file->path, file->offset, file->num_bytes);
  else if (file->bytes != NULL)
    pl_read_ahead(file->bytes, (size_t)file->num_bytes);
}

/* ---- what threads do ------------------------------------------------------------------------------------------- */

static pl_status decode_record(pl_scratch *scratch, const pl_image *image, const pl_crop *crop, uint8_t *out) {
  pl_record record;
  size_t num_bytes = (size_t)image->file.num_bytes;
  if (!pl_is_readable(image->file.bytes, num_bytes)) return PL_UNREADABLE;
  pl_status status = pl_record_open(image->file.bytes, num_bytes, &record);
  if (status != PL_OK) return status;
  return pl_decode_crop(&record, image->box, crop->inside, image->flip, crop->size, crop->channels, crop->stage,
                        scratch, out);
}

/* Return the bytes that are kept, after giving back too many. */
static size_t keep(worker *self) {
  if (self->scratch == NULL || pl_scratch_bytes(self->scratch) > PL_KEPT_BYTES) {
    pl_scratch_free(self->scratch);
    self->scratch = pl_scratch_new();
  }
  return self->scratch != NULL ? pl_scratch_bytes(self->scratch) : 0;
}

/* Claim the next image. The lock is held, and there is one. */
static size_t claim(pl_pool *pool) {
  pl_task *task = pool->first;
  size_t index = task->claimed++;
  if (task->asked == index)
    task->asked++; /* nobody asked: whoever claims it reads it */
  else
    pool->num_ahead--;
  if (task->claimed == task->n) take_out(pool, task);
  task->under_way++;
  return index;
}

static pl_status make_image(pl_scratch *scratch, pl_task *task, size_t index) {
  const pl_image *image = &task->images[index];
  const pl_batch *batch = &task->batch;
  const pl_crop *crop = &batch->crop;
  if (scratch == NULL) return PL_NO_MEMORY;
  if (batch->kind == PL_HEADERS) return pl_measure_file(&image->file, scratch, batch->sizes + 2 * index);
  uint8_t *out = batch->out + index * (size_t)crop->channels * (size_t)crop->size * (size_t)crop->size;
  if (batch->kind == PL_RECORDS) return decode_record(scratch, image, crop, out);
  return pl_crop_file(&image->file, image->box, image->flip, crop, batch->sizes + 2 * index, scratch, out,
                      &task->entries[index]);
}

/* Make one image of a task that was just claimed. Return the bytes that the thread keeps. */
static size_t make(worker *self, pl_task *task, size_t index) {
  const pl_file *file = &task->images[index].file;
  if (file->path != NULL || file->bytes != NULL)
    task->batch.status[index] = (int32_t)make_image(self->scratch, task, index);
  return keep(self);
}

static void *run(void *argument) {
  worker *self = argument;
  pl_pool *pool = self->pool;
  ahead chosen[BURST];
  pthread_mutex_lock(&pool->lock);
  for (;;) {
    while (pool->first == NULL && !pool->is_closing) pthread_cond_wait(&pool->work, &pool->lock);
    if (pool->is_closing) break;
    pl_task *task = pool->first;
    size_t index = claim(pool);
    size_t num_ahead = choose_ahead(pool, chosen);
    pthread_mutex_unlock(&pool->lock);

    int64_t begin_ns = now_ns();
    for (size_t i = 0; i < num_ahead; i++) read_ahead(&chosen[i]);
    size_t kept = make(self, task, index);
    int64_t busy_ns = now_ns() - begin_ns;

    pthread_mutex_lock(&pool->lock);
    self->scratch_bytes = kept;
    task->busy_ns += busy_ns;
    task->under_way--;
    /* Under the lock: once it is released the task may be freed. */
    if (task->under_way == 0 && task->claimed == task->n) pthread_cond_broadcast(&task->done);
  }
  pool->num_alive--;
  pthread_cond_broadcast(&pool->ended);
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

/* ---- the pool -------------------------------------------------------------------------------------------------- */

/* Start a thread that is never interrupted by signals, but for those that its own mistakes raise: a fault then ends
 * the process by way of its handler, such as Python's faulthandler. */
static int start(worker *self) {
  sigset_t all, before;
  sigfillset(&all);
  sigdelset(&all, SIGSEGV);
  sigdelset(&all, SIGBUS);
  sigdelset(&all, SIGILL);
  sigdelset(&all, SIGFPE);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&self->thread, NULL, run, self);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error == 0) pthread_setname_np(self->thread, "paceline-decode");
  return error;
}

pl_pool *pl_pool_new(int num_threads, int *error) {
  pl_pool *pool = calloc(1, sizeof(pl_pool) + (size_t)num_threads * sizeof(worker));
  *error = ENOMEM;
  if (pool == NULL) return NULL;
  pool->pid = getpid();
  pthread_mutex_init(&pool->lock, NULL);
  new_condition(&pool->work);
  new_condition(&pool->ended);
  for (*error = 0; pool->num_threads < num_threads; pool->num_threads++) {
    worker *self = &pool->workers[pool->num_threads];
    self->pool = pool;
    self->scratch = pl_scratch_new();
    pool->num_alive++;
    *error = self->scratch != NULL ? start(self) : ENOMEM;
    if (*error == 0) continue;
    pool->num_alive--;
    pl_scratch_free(self->scratch);
    (void)pl_pool_close(pool); /* no thread has anything to do */
    pl_pool_free(pool);
    return NULL;
  }
  return pool;
}

static void drop(pl_task *task) {
  if (task->claimed == task->n) return;
  take_out(task->pool, task);
  task->pool->num_ahead -= task->asked - task->claimed;
  task->claimed = task->asked = task->n;
  task->is_dropped = true;
  pthread_cond_broadcast(&task->done);
}

bool pl_pool_close(pl_pool *pool) {
  struct timespec until = after(PATIENCE_NS);
  pthread_mutex_lock(&pool->lock);
  pool->is_closing = true;
  while (pool->first != NULL) drop(pool->first);
  pthread_cond_broadcast(&pool->work);
  for (int error = 0; pool->num_alive > 0 && error == 0;)
    error = pthread_cond_timedwait(&pool->ended, &pool->lock, &until);
  bool are_ended = pool->num_alive == 0, joins = are_ended && !pool->is_joined;
  pool->is_joined = are_ended;
  for (int i = 0; joins && i < pool->num_threads; i++) { /* they have only to return, and need no lock for it */
    pthread_join(pool->workers[i].thread, NULL);
    pl_scratch_free(pool->workers[i].scratch);
    pool->workers[i].scratch_bytes = 0;
  }
  pthread_mutex_unlock(&pool->lock);
  return are_ended;
}

void pl_pool_free(pl_pool *pool) {
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->ended);
  pthread_mutex_destroy(&pool->lock);
  free(pool);
}

bool pl_pool_is_mine(const pl_pool *pool) { return pool->pid == getpid(); }

size_t pl_pool_scratch_bytes(pl_pool *pool) {
  size_t sum = 0;
  pthread_mutex_lock(&pool->lock);
  for (int i = 0; i < pool->num_threads; i++) sum += pool->workers[i].scratch_bytes;
  pthread_mutex_unlock(&pool->lock);
  return sum;
}

/* ---- tasks ----------------------------------------------------------------------------------------------------- */

pl_task *pl_pool_submit(pl_pool *pool, pl_image *images, size_t n, const pl_batch *batch) {
  pl_task *task = calloc(1, sizeof(pl_task));
  pl_entry *entries = batch->kind == PL_FILES ? calloc(n + 1, sizeof(pl_entry)) : NULL;
  if (task == NULL || (entries == NULL && batch->kind == PL_FILES)) {
    free(task);
    return NULL;
  }
  *task = (pl_task){.pool = pool, .images = images, .n = n, .batch = *batch, .entries = entries};
  new_condition(&task->done);
  pthread_mutex_lock(&pool->lock);
  bool is_closed = pool->is_closing;
  if (!is_closed && n > 0) {
    *(pool->last != NULL ? &pool->last->follower : &pool->first) = task;
    pool->last = task;
    pthread_cond_broadcast(&pool->work);
  }
  pthread_mutex_unlock(&pool->lock);
  if (!is_closed) return task;
  pthread_cond_destroy(&task->done);
  free(entries);
  free(task);
  return NULL;
}

pl_task_state pl_task_wait(pl_task *task, int64_t timeout_ns) {
  struct timespec until = after(timeout_ns);
  pthread_mutex_lock(&task->pool->lock);
  int error = timeout_ns > 0 ? 0 : ETIMEDOUT;
  while ((task->under_way > 0 || task->claimed < task->n) && error == 0)
    error = pthread_cond_timedwait(&task->done, &task->pool->lock, &until);
  bool is_done = task->under_way == 0 && task->claimed == task->n;
  bool is_dropped = task->is_dropped;
  pthread_mutex_unlock(&task->pool->lock);
  if (!is_done) return PL_RUNNING;
  return is_dropped ? PL_DROPPED : PL_DONE;
}

int64_t pl_task_busy_ns(pl_task *task) {
  pthread_mutex_lock(&task->pool->lock);
  int64_t busy_ns = task->busy_ns;
  pthread_mutex_unlock(&task->pool->lock);
  return busy_ns;
}

bool pl_task_free(pl_task *task) {
  pl_pool *pool = task->pool;
  struct timespec until = after(PATIENCE_NS);
  pthread_mutex_lock(&pool->lock);
  drop(task);
  for (int error = 0; task->under_way > 0 && error == 0;)
    error = pthread_cond_timedwait(&task->done, &pool->lock, &until);
  bool is_idle = task->under_way == 0;
  pthread_mutex_unlock(&pool->lock);
  if (!is_idle) return false;
  pthread_cond_destroy(&task->done);
  pl_task_forget(task);
  return true;
}

size_t pl_task_size(const pl_task *task) { return task->n; }

pl_entry pl_task_entry(const pl_task *task, size_t i) {
  return task->entries != NULL ? task->entries[i] : (pl_entry){NULL, 0};
}

void pl_task_forget(pl_task *task) {
  for (size_t i = 0; task->entries != NULL && i < task->n; i++) free(task->entries[i].bytes);
  free(task->entries);
  free(task->images);
  free(task);
}
