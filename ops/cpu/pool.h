// A small pool of threads: no OpenMP, so that it cannot clash with the runtime that torch brought along.
#pragma once
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <thread>

namespace dss {

class Pool {
   public:
    // Calls work(0) .. work(threads - 1), each once, and returns when all are done. When the pool is taken by another
    // caller, or no thread can be had, the caller does the rest itself: results never depend on who does what.
    static void run(int threads, const std::function<void(int)>& work) {
        if (threads <= 1) return work(0);
        Pool& pool = current();
        std::unique_lock<std::mutex> mine(pool.taken_, std::try_to_lock);
        if (!mine.owns_lock()) {
            for (int t = 0; t < threads; ++t) work(t);
            return;
        }
        pool.run_all(threads, work);
    }

   private:
    // A child of fork() has none of the threads and perhaps a locked mutex: it gets a new pool. The old one is left
    // alone, as is the last one at exit (its threads sleep; destroying them would only be a way to hang).
    static Pool& current() {
        static std::atomic<Pool*> pool{nullptr};
        static const int registered = [] {
            pool = new Pool;
            return pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
        }();
        (void)registered;
        return *pool;
    }

    void run_all(int threads, const std::function<void(int)>& work) {
        std::unique_lock<std::mutex> lock(mutex_);
        try {
            for (; started_ < threads - 1; ++started_) std::thread([this] { serve(); }).detach();
        } catch (const std::exception&) {  // no thread to be had: the caller works through what is left
        }
        work_ = &work;
        next_ = 0;
        failed_ = false;
        total_ = left_ = threads;
        wake_.notify_all();
        help(lock);
        done_.wait(lock, [this] { return left_ == 0; });
        work_ = nullptr;
        if (failed_) throw std::bad_alloc();  // the one thing that the work throws
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return work_ != nullptr && next_ < total_; });
            help(lock);
        }
    }

    void help(std::unique_lock<std::mutex>& lock) {
        while (work_ != nullptr && next_ < total_) {
            const int mine = next_++;
            const auto* work = work_;
            lock.unlock();
            bool failed = false;
            try {
                (*work)(mine);
            } catch (...) {
                failed = true;
            }
            lock.lock();
            failed_ |= failed;
            if (--left_ == 0) done_.notify_one();
        }
    }

    std::mutex taken_, mutex_;
    std::condition_variable wake_, done_;
    const std::function<void(int)>* work_ = nullptr;
    bool failed_ = false;
    int started_ = 0, next_ = 0, total_ = 0, left_ = 0;
};

}  // namespace dss
