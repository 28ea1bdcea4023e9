//! Style rules of this project, as tests, so that reviewers need not check them.
//!
//! Every rule is one test over the files of this checkout. Every rule's checker is also tested with
//! a violation, so that no check passes always.

#[cfg(test)]
mod cycles;
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
mod vocabulary;
#[cfg(test)]
mod words;
