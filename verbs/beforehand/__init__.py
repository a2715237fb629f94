"""Verbs that say something before anything is computed: what a job would do."""
