# What gpu-test.sh and gpu-slot.sh share. They source it at the root of the tree.

# The tests of kernels and models that compare a GPU with the CPU.
parity='TestKernels|TestModels|TestModelBF16|TestStepsAhead|TestMasks|TestDraws|TestMirror|TestDirect|TestDeterministic|TestAdapters|TestLongContexts|TestHalves|TestInt4|TestDelta'

# The kernels that TD_KERNELS may name, in the order of their declarations.
names=$(sed -n '/^struct Tried {/,/^};/s/^  bool \([a-z0-9]*\) = false;.*/\1/p' cuda/runtime/plan.h)
[ -n "$names" ] || { echo "cuda/runtime/plan.h names no kernels" >&2; exit 1; }

# without NAME... prints all names but these, separated by commas.
without() {
	local left=" "
	for name in $names; do
		case " $* " in *" $name "*) ;; *) left="$left$name " ;; esac
	done
	left=$(echo $left)
	echo "${left// /,}"
}

# is_name reports whether TD_KERNELS may name a kernel.
is_name() { case " $(echo $names) " in *" $1 "*) ;; *) return 1 ;; esac; }
