// The floor that the ring is compared with: two processes pass one word through shared memory.
// Usage: pingpong spin|wake|futex ROUNDS   prints the nanoseconds of each round trip, one per line
// spin: both spin. wake: the peer sleeps, the caller spins. futex: both sleep.
#define _GNU_SOURCE
#include <linux/futex.h>
#include <stdatomic.h>
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

struct shared {
  _Alignas(64) atomic_uint ping;
  _Alignas(64) atomic_uint pong;
};

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
  unsigned rounds = (unsigned)atoi(argv[2]);
  struct shared* s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (s == MAP_FAILED) return 1;
  pid_t child = fork();
  if (child < 0) return 1;
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (unsigned i = 1; i <= rounds; ++i) {
      await(&s->ping, i, peer_sleeps);
      signal_peer(&s->pong, i, caller_sleeps);
    }
    _exit(0);
  }
  for (unsigned i = 1; i <= rounds; ++i) {
    // Asleep means asleep: the peer gets the time to block before the round starts.
    if (peer_sleeps) usleep(200);
    long start = now_ns();
    signal_peer(&s->ping, i, peer_sleeps);
    await(&s->pong, i, caller_sleeps);
    printf("%ld\n", now_ns() - start);
  }
  return waitpid(child, NULL, 0) == child ? 0 : 1;
}
