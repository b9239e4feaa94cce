// The priority of threads that work in the background.
#pragma once

namespace train_gpt {

/// Lets other threads go before the calling one, for processors and disks. Does nothing where the
/// system refuses.
void lower_thread_priority();

}  // namespace train_gpt
