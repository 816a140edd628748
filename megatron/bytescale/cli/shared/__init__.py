"""Options, inputs and tables that several subcommands share."""
