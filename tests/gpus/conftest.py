"""The stand-ins are modules for the processes of a test; they are not collected."""

collect_ignore_glob = ["*.py"]
