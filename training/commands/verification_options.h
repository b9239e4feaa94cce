// What `verify` is asked to do.
#pragma once
#include <string>

namespace train_gpt {

struct VerifyOptions {
    std::string what;
    std::string run;            // of an exported model: the folder of the run that it is from
    std::string binary;         // a program that must have trained the newest steps of the run
    std::string head;           // a hash that a line of the run's history must have
    bool without_data = false;  // do not read the run's shards and tokenizer
    bool json = false;          // print one object instead of the table
};

}  // namespace train_gpt
