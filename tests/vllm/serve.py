"""Start vLLM's API servers: ``python serve.py MODEL [options of vllm serve]``.

The command ``vllm serve`` needs a distribution with the name "vllm", and CPU builds have another
name. API servers are processes that import this file again.
"""

import sys

if __name__ == "__main__":
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = FlexibleArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers())
    args = parser.parse_args(["serve", *sys.argv[1:]])
    ServeSubcommand().validate(args)
    ServeSubcommand.cmd(args)
