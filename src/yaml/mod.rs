//! YAML documents with the line of every key and value, and findings about them.
//!
//! The configuration, the mesh file and Kubernetes objects are read by this module: one mistake
//! does not hide the next one, and each is reported with its line.

mod fields;
mod files;
mod findings;
mod tree;
mod value;

pub use fields::Fields;
pub use files::yaml_files;
pub use findings::{Finding, Findings, Place, Position, Report, Severity};
pub use tree::{Document, Entry, FILE_BYTES_MAX, Kind, Layer, Node};
pub use value::Value;
