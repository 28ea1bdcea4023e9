//! `strait schema`: the keys of `strait.yaml` as a JSON Schema or as Markdown.

use super::text::print;
use crate::config::reference;

/// Arguments of `strait schema`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  strait schema > strait.schema.json")]
pub(super) struct Args {
    /// Prints Markdown, as in docs/configuration.md.
    #[arg(long)]
    markdown: bool,
}

/// Prints the reference.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    print(if args.markdown {
        reference::markdown()
    } else {
        format!("{:#}\n", reference::schema())
    })
}
