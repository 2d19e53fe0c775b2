// The threads of a call. Tasks are taken from counters: whoever is there works, and nobody waits for a thread that has
// not come yet, so that a busy machine slows a call down in proportion and no more.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <pthread.h>

enum { PHASES = 14, SPINS = 4000 };  // of a call; looks before a waiting thread sleeps

static inline void rest() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// Looks until `ready`; before long it leaves the processor to others: whom it waits for may have none.
template <class F>
static void await(F&& ready) {
  for (long looks = 0; !ready(); looks++)
    if (looks < SPINS) rest();
    else std::this_thread::yield();
}

struct Count {
  alignas(64) std::atomic<long> next{0};
  alignas(64) std::atomic<long> done{0};
};

// One thread's way through the phases of a call. A thread that comes late finds the phases before it done.
struct Member {
  Count* count;

  // f(i) for i in [0, total), each once, by whoever comes; all are done, and seen to be done, on return.
  template <class F>
  void each(long total, F&& f) {
    long mine = 0;
    for (long i; (i = take()) < total; mine++) f(i);
    all_done(mine, total);
  }

  // f(i, next): the same, by threads that know what they do next; `total` stands for nothing.
  template <class F>
  void each_after(long total, F&& f) {
    long mine = 0;
    for (long i = take(), next; i < total; i = next, mine++) f(i, next = std::min(take(), total));
    all_done(mine, total);
  }

 private:
  long take() { return count->next.fetch_add(1, std::memory_order_relaxed); }
  void all_done(long mine, long total) {
    count->done.fetch_add(mine, std::memory_order_release);
    await([&] { return count->done.load(std::memory_order_acquire) >= total; });
    count++;
  }
};

// Helpers wait for the next call: awake for some microseconds, then asleep. One call at a time has them.
class Pool {
 public:
  // Never destroyed: the helpers outlive main. A forked child has none of them, and gets a pool of its own.
  static Pool*& get() {
    static Pool* pool = (pthread_atfork(nullptr, nullptr, [] { get() = new Pool; }), new Pool);
    return pool;
  }

  void run(long threads, void (*work)(void*), void* with) {
    if (threads < 2) return work(with);  // others may have the helpers meanwhile
    std::unique_lock<std::mutex> only(calling, std::try_to_lock);
    if (!only) return work(with);
    while (hired < threads - 1 && hire()) hired++;
    body = work, context = with;
    seats = threads - 1, open = true, calls++;
    if (asleep) {
      std::lock_guard<std::mutex> quiet(bedroom);
      wake.notify_all();
    }
    work(with);
    open = false;
    await([&] { return !inside; });
  }

 private:
  std::mutex calling, bedroom;
  std::condition_variable wake;
  std::atomic<long> calls{0}, seats{0}, inside{0}, asleep{0};
  std::atomic<bool> open{false};
  void (*body)(void*) = nullptr;
  void* context = nullptr;
  long hired = 0;

  bool hire() {
    try {
      std::thread([this] { serve(); }).detach();
      return true;
    } catch (const std::system_error&) {  // the machine gives no more threads: fewer do the work
      return false;
    }
  }

  void serve() {
    for (long seen = 0;;) {
      for (long looks = 0; calls == seen && looks < SPINS; looks++) rest();
      if (calls == seen) {
        std::unique_lock<std::mutex> quiet(bedroom);
        asleep++;
        wake.wait(quiet, [&] { return calls != seen; });
        asleep--;
      }
      inside++;  // before `open` is read: the caller closes, then waits until nobody is inside
      seen = calls;
      if (open && seats-- > 0) body(context);
      inside--;
    }
  }
};

// body(member) by up to `threads` threads, all of which go through the same phases.
template <class F>
static void together(long threads, F&& body) {
  struct Call {
    Count counts[PHASES];
    F& body;
  } call{{}, body};
  Pool::get()->run(threads, [](void* c) {
    Member member{((Call*)c)->counts};
    ((Call*)c)->body(member);
  }, &call);
}
