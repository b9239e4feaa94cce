// The secret by which the ranks of a job know each other.
#pragma once
#include <string>

#include "parallel/launch/place.h"

namespace train_gpt {

/// The job's secret and where it is from:
///   TRAIN_GPT_SECRET, if set;
///   else the file TRAIN_GPT_SECRET_FILE, or ~/.config/train_gpt/secret. If it is not there, it is
///     made with random contents and mode 600: on storage that all hosts see, every rank finds the
///     same. It must belong to this user, and others must not have access to it.
/// Slurm has no key for a job that its processes could use: its credentials stay between its
/// daemons, and its variables can be guessed or seen by others.
/// Throws Error if there is no secret, and says how to give one.
struct Secret {
    std::string text;
    std::string source;  // "TRAIN_GPT_SECRET" or a file's name, for messages
};
Secret find_secret(const Variables& variables);

}  // namespace train_gpt
