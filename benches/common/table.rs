//! Markdown tables.

/// Returns a row.
pub fn line(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

/// Returns the header rows.
pub fn head(columns: &[&str]) -> String {
    let columns: Vec<String> = columns.iter().map(|&column| column.to_owned()).collect();
    line(&columns) + &line(&vec!["---".to_owned(); columns.len()])
}
