// The floor that the ring is compared with: two processes pass one word through shared memory.
// Usage: pingpong spin|lines|wake|futex ROUNDS   prints the nanoseconds of each round trip, one per line
// spin: both spin. lines: so they do, and pass with the word as many lines as a ticket of one record of 512 bytes and
// its answer, each of which the other side reads. wake: the peer sleeps, the caller spins. futex: both sleep.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST_LINES = 2, ANSWER_LINES = 9 };  // beside the word's: run and pair; the record, and what is consumed

struct shared {
  _Alignas(64) atomic_uint ping;
  _Alignas(64) atomic_uint pong;
  _Alignas(64) volatile uint64_t request[REQUEST_LINES][8], answer[ANSWER_LINES][8];
};

static void write_lines(volatile uint64_t (*lines)[8], int count, uint64_t value) {
  for (int line = 0; line < count; ++line)
    for (int word = 0; word < 8; ++word) lines[line][word] = value;
}

static uint64_t read_lines(volatile uint64_t (*lines)[8], int count) {
  uint64_t all = 0;
  for (int line = 0; line < count; ++line)
    for (int word = 0; word < 8; ++word) all |= lines[line][word];
  return all;
}

static long now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void await(atomic_uint* word, unsigned value, int sleeping) {
  unsigned seen;
  while ((seen = atomic_load_explicit(word, memory_order_acquire)) != value) {
    if (sleeping) {
      struct timespec second = {1, 0};
      syscall(SYS_futex, word, FUTEX_WAIT, seen, &second, NULL, 0);
    } else {
      __builtin_ia32_pause();
    }
  }
}

static void signal_peer(atomic_uint* word, unsigned value, int sleeping) {
  atomic_store_explicit(word, value, memory_order_release);
  if (sleeping) syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  int caller_sleeps = strcmp(argv[1], "futex") == 0;
  int peer_sleeps = caller_sleeps || strcmp(argv[1], "wake") == 0;
  const int request = strcmp(argv[1], "lines") == 0 ? REQUEST_LINES : 0, answer = request ? ANSWER_LINES : 0;
  unsigned rounds = (unsigned)atoi(argv[2]);
  struct shared* s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (s == MAP_FAILED) return 1;
  pid_t child = fork();
  if (child < 0) return 1;
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (unsigned i = 1; i <= rounds; ++i) {
      await(&s->ping, i, peer_sleeps);
      if (request && read_lines(s->request, request) != i) _exit(1);
      write_lines(s->answer, answer, i);
      signal_peer(&s->pong, i, caller_sleeps);
    }
    _exit(0);
  }
  for (unsigned i = 1; i <= rounds; ++i) {
    // Asleep means asleep: the peer gets the time to block before the round starts.
    if (peer_sleeps) usleep(200);
    long start = now_ns();
    write_lines(s->request, request, i);
    signal_peer(&s->ping, i, peer_sleeps);
    await(&s->pong, i, caller_sleeps);
    if (answer && read_lines(s->answer, answer) != i) return 1;
    printf("%ld\n", now_ns() - start);
  }
  return waitpid(child, NULL, 0) == child ? 0 : 1;
}
