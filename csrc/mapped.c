/* Mappings whose files may be cut short: a list that a signal handler walks through. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "mapped.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Entries are never freed, as the handler may be walking through them: one that is free has `begin` 0. */
struct pl_mapping {
  _Atomic uintptr_t begin, end; /* whole pages */
  int protection;
  char *name;
  pl_mapping *next;
};

static _Atomic(pl_mapping *) all;
static _Atomic(const char *) cut;
static struct sigaction before;
static uintptr_t page_bytes;

static void leave_to_others(int number, siginfo_t *info, void *context) {
  if (before.sa_flags & SA_SIGINFO)
    before.sa_sigaction(number, info, context);
  else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN)
    (void)signal(number, SIG_DFL); /* the same instruction faults again, and ends the process */
  else
    before.sa_handler(number);
}

static void put_zeros(int number, siginfo_t *info, void *context) {
  int error = errno;
  uintptr_t at = (uintptr_t)info->si_addr;
  for (pl_mapping *each = atomic_load(&all); each != NULL && info->si_code > 0; each = each->next) {
    uintptr_t begin = atomic_load(&each->begin), end = atomic_load(&each->end);
    if (begin == 0 || at < begin || at >= end) continue;
    uintptr_t page = at & ~(page_bytes - 1);
    void *zeros = mmap((void *)page, end - page, each->protection,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    if (zeros == MAP_FAILED) break;
    const char *none = NULL;
    if (each->name[0] != '\0') atomic_compare_exchange_strong(&cut, &none, each->name);
    errno = error;
    return;
  }
  errno = error;
  leave_to_others(number, info, context);
}

/* Install the handler, unless it is there: somebody may have put another in its place. */
static int install(void) {
  struct sigaction now, ours = {.sa_sigaction = put_zeros, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
  if (sigaction(SIGBUS, NULL, &now)) return -1;
  if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == put_zeros) return 0;
  sigemptyset(&ours.sa_mask);
  before = now;
  page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
  return sigaction(SIGBUS, &ours, NULL);
}

static pl_mapping *free_entry(void) {
  for (pl_mapping *each = atomic_load(&all); each != NULL; each = each->next)
    if (atomic_load(&each->begin) == 0) return each;
  pl_mapping *entry = calloc(1, sizeof *entry);
  if (entry == NULL) return NULL;
  entry->next = atomic_load(&all);
  atomic_store(&all, entry);
  return entry;
}

pl_mapping *pl_mapping_new(int descriptor, size_t num_bytes, off_t offset, bool is_private, const char *name) {
  if (install()) return NULL;
  pl_mapping *entry = free_entry();
  char *kept = strdup(name);
  int protection = is_private ? PROT_READ | PROT_WRITE : PROT_READ;
  void *bytes = MAP_FAILED;
  if (entry != NULL && kept != NULL)
    bytes = mmap(NULL, num_bytes, protection, is_private ? MAP_PRIVATE : MAP_SHARED, descriptor, offset);
  if (bytes == MAP_FAILED) {
    free(kept);
    return NULL;
  }
  entry->protection = protection;
  entry->name = kept;
  atomic_store(&entry->end, ((uintptr_t)bytes + num_bytes + page_bytes - 1) & ~(page_bytes - 1));
  atomic_store(&entry->begin, (uintptr_t)bytes); /* last: from here on the handler sees it */
  return entry;
}

void *pl_mapping_bytes(const pl_mapping *mapping) { return (void *)atomic_load(&mapping->begin); }

void pl_mapping_free(pl_mapping *mapping) {
  uintptr_t begin = atomic_load(&mapping->begin), end = atomic_load(&mapping->end);
  atomic_store(&mapping->begin, 0);
  (void)munmap((void *)begin, end - begin);
  const char *name = mapping->name;
  atomic_compare_exchange_strong(&cut, &name, NULL); /* whoever maps the file anew finds it whole, or cut again */
  free(mapping->name);
  mapping->name = NULL;
}

const char *pl_mapping_cut(void) { return atomic_load(&cut); }
