/* rlhf: the program. */
#include "orchestrator/cli.h"

int main(int argc, char **argv) { return cli_main(argc, argv); }
