//! The documentation: its links, its size, and its agreement with the code.

mod links;
mod markdown;
mod messages;
mod metrics;
mod page;
mod prose;
mod reasons;
mod results;
