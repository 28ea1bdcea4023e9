//! Format of the output of commands.

/// Arguments of a command whose output is text or JSON.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Output {
    /// Format of the output.
    #[arg(
        short,
        long,
        alias = "format",
        value_name = "FORMAT",
        default_value = "text",
        value_parser = ["text", "json"]
    )]
    output: String,
    /// Spelling of `-o json` in scripts from before it.
    #[arg(long, hide = true)]
    json: bool,
}

impl Output {
    pub(crate) fn is_json(&self) -> bool {
        self.json || self.output == "json"
    }
}
