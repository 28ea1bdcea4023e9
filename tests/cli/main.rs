//! End-to-end tests of the command line: its output, its exit codes, its files.

#![expect(unreachable_pub, reason = "a test binary exports nothing, and plain `pub` reads better")]

#[cfg(test)]
mod support;

#[cfg(test)]
mod absent;
#[cfg(test)]
mod addresses;
#[cfg(test)]
mod bug_report;
#[cfg(test)]
mod certs;
#[cfg(test)]
mod check;
#[cfg(test)]
mod demo;
#[cfg(test)]
mod deploy;
#[cfg(test)]
mod directory;
#[cfg(test)]
mod doctor;
#[cfg(test)]
mod documents;
#[cfg(test)]
mod explain;
#[cfg(test)]
mod install;
#[cfg(test)]
mod issuers;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod reach;
#[cfg(test)]
mod revocation;
#[cfg(test)]
mod routes;
#[cfg(test)]
mod schema;
#[cfg(test)]
mod status;
#[cfg(test)]
mod strict;
#[cfg(test)]
mod subsets;
#[cfg(test)]
mod systemd;
#[cfg(test)]
mod tenants;
#[cfg(test)]
mod top;
