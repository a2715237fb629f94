"""Before anything is computed: what a shell offers while one types, and a look at the machine."""
