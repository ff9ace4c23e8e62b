// How ranks make a group through torch's store.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <shoal/shoal.h>

#include "communicator.h"
#include "gil.h"

namespace {

// torch's store as the library wants it: set, get with a deadline, erase. torch may hand out the same store again for a later
// group (a group destroyed and made anew under torchrun): each rank counts its own joins, and keys carry the number.
class Rendezvous {
  public:
    Rendezvous(Ref<c10d::Store> store, int rank)
        : store_(std::move(store)), prefix_(c10::str(store_->add(c10::str("shoal joins ", rank), 1), "/"))
    {
    }

    shoal_store callbacks()
    {
        return {set, get, erase, this};
    }

    // A handler of a signal raised while ranks were waited for.
    void rethrow() const
    {
        if (interruption_)
            std::rethrow_exception(interruption_);
    }

  private:
    static int set(void *self, const char *key, const void *value, size_t bytes)
    {
        const auto *at = static_cast<const uint8_t *>(value);
        return guarded(self, -2, [&](Rendezvous &r) {
            r.store_->set(r.prefix_ + key, std::vector<uint8_t>(at, at + bytes));
            return 0;
        });
    }

    // A store's own wait cannot be left on a signal, and not in all versions without spoiling the store's connection.
    static long get(void *self, const char *key, void *value, size_t capacity, uint32_t timeout_ms)
    {
        return guarded(self, -2L, [&](Rendezvous &r) {
            const auto until = std::chrono::steady_clock::now() + milliseconds(timeout_ms);
            std::chrono::microseconds pause{50};
            while (!r.store_->check({r.prefix_ + key})) {
                if (std::chrono::steady_clock::now() >= until)
                    return -1L;
                raise_signals();
                std::this_thread::sleep_for(pause);
                pause = std::min<std::chrono::microseconds>(pause * 2, std::chrono::milliseconds(20));
            }
            const std::vector<uint8_t> found = r.store_->get(r.prefix_ + key);
            std::copy_n(found.begin(), std::min(found.size(), capacity), static_cast<uint8_t *>(value));
            return static_cast<long>(found.size());
        });
    }

    static int erase(void *self, const char *key)
    {
        return guarded(self, -2, [&](Rendezvous &r) {
            r.store_->deleteKey(r.prefix_ + key);
            return 0;
        });
    }

    template <class Result, class Call>
    static Result guarded(void *self, Result failed, Call call)
    {
        auto &rendezvous = *static_cast<Rendezvous *>(self);
        try {
            return call(rendezvous);
        } catch (pybind11::error_already_set &) {
            rendezvous.interruption_ = std::current_exception();
        } catch (const std::exception &error) {
            TORCH_WARN("shoal: the store failed: ", error.what());
        }
        return failed;
    }

    const Ref<c10d::Store> store_;
    const std::string prefix_;
    std::exception_ptr interruption_;
};

} // namespace
