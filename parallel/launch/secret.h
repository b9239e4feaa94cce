// The secret by which the ranks of a job know each other.
#pragma once
#include <string>

#include "parallel/launch/place.h"

namespace train_gpt {

/// The job's secret and where it is from. The secret is the first of these:
///   the text of the variable TRAIN_GPT_SECRET, if it is set;
///   the contents of the file that TRAIN_GPT_SECRET_FILE names, if it is set;
///   the contents of ~/.config/train_gpt/secret.
/// If the file does not exist, it is made with random contents and mode 600. On storage that all
/// hosts see, every rank then finds the same secret. The file must belong to this user, and others
/// must not have access to it.
///
/// A job's secret cannot come from Slurm: only Slurm's daemons see its credentials, and other users
/// can guess or see its variables.
///
/// Throws Error if there is no secret, or if it is too short. The message says how to give one.
struct Secret {
    std::string text;
    std::string source;  // "TRAIN_GPT_SECRET" or a file's name, for messages
};
Secret find_secret(const Variables& variables);

/// Finds the secret in this process's environment, as find_secret() does, and removes
/// TRAIN_GPT_SECRET from it. So programs that this process starts do not get the variable, and its
/// text is overwritten where /proc/PID/environ shows it. Until then, and in the environment of the
/// process that started this one, the same user's programs can read it. Call it while no other
/// thread uses the environment.
Secret take_secret();

}  // namespace train_gpt
