// What ThreadSanitizer is told of fibers, where a program is built with it; else nothing.
//
// Fibers share threads of the system, and what happens to be run first is not thereby ordered: an order is only what
// `release` and a later `acquire` of the same address make. To be told so, and not misled by the harness' own memory,
// only the kernels are compiled with -fsanitize=thread, and the harness with -DPOLYAMP_RACES.
#pragma once

#ifdef POLYAMP_RACES
#include <sanitizer/tsan_interface.h>
#endif

namespace ordering {

using Actor = void*;  // a fiber or a thread of the system, as ThreadSanitizer sees it

#ifdef POLYAMP_RACES
constexpr bool kIsWatched = true;
inline Actor create() { return __tsan_create_fiber(0); }
inline Actor current() { return __tsan_get_current_fiber(); }
inline void destroy(Actor actor) { __tsan_destroy_fiber(actor); }
inline void become(Actor actor) { __tsan_switch_to_fiber(actor, __tsan_switch_to_fiber_no_sync); }
inline void release(void* at) { __tsan_release(at); }
inline void acquire(void* at) { __tsan_acquire(at); }
#else
constexpr bool kIsWatched = false;
inline Actor create() { return nullptr; }
inline Actor current() { return nullptr; }
inline void destroy(Actor) {}
inline void become(Actor) {}
inline void release(void*) {}
inline void acquire(void*) {}
#endif

}  // namespace ordering
