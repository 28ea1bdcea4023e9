//! The style of this project, as tests: what a reviewer should not have to look for.
//!
//! Every rule is one test over the files of this checkout. Every rule's checker is also fed
//! something that breaks it, so that a check which cannot fail does not exist.

#[cfg(test)]
mod datapath;
#[cfg(test)]
mod documents;
#[cfg(test)]
mod files;
#[cfg(test)]
mod imports;
#[cfg(test)]
mod references;
#[cfg(test)]
mod security;
#[cfg(test)]
mod shape;
#[cfg(test)]
mod tree;
#[cfg(test)]
mod words;
