"""What several subcommands share."""
