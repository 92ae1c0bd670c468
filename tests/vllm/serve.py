"""Start vLLM's API servers, as ``vllm serve``: ``python serve.py MODEL [OPTIONS]``.

The command ``vllm serve`` itself fails for CPU builds: it requires a distribution with the name
"vllm", and CPU builds have another name. Each API server is a process that imports this file.
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
